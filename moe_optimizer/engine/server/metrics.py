"""`Metrics`: counts and times in Prometheus' text format, named as vLLM names them behind another prefix."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from moe_optimizer.engine.llm_engine import LLMEngine
from moe_optimizer.engine.outputs import RequestOutput

_PREFIX = "moe_optimizer:"


class Metrics:
    """Watches the streams of an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.num_failed = 0
        self._num_finished = self._num_aborted = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0
        self._first_token_s = self._request_s = 0.0

    async def watch(self, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Yield what the stream yields, and count it."""
        started, first, finished = time.monotonic(), None, False
        try:
            async for output in stream:
                first = first or time.monotonic()
                finished = output.finished
                self._num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
                if finished:
                    self._num_finished += 1
                    self._num_prompt_tokens += len(output.prompt_token_ids)
                    self._num_cached_tokens += output.num_cached_tokens
                    self._first_token_s += first - started
                    self._request_s += time.monotonic() - started
                yield output
        finally:
            self._num_aborted += not finished
            await stream.aclose()  # type: ignore[attr-defined]

    def text(self) -> str:
        """Return all of them."""
        scheduler = self._engine.scheduler
        held = 1 - scheduler.blocks.num_available / scheduler.blocks.num_blocks
        gauges = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": held,
        }
        counters = {
            "prompt_tokens_total": self._num_prompt_tokens,
            "prompt_tokens_cached_total": self._num_cached_tokens,
            "generation_tokens_total": self._num_output_tokens,
            "request_success_total": self._num_finished,
            "request_aborted_total": self._num_aborted,
            "request_failed_total": self.num_failed,
            "num_preemptions_total": scheduler.num_preemptions,
            "time_to_first_token_seconds_sum": self._first_token_s,
            "e2e_request_latency_seconds_sum": self._request_s,
        }
        lines = []
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [f"# TYPE {_PREFIX}{name} {kind}", f"{_PREFIX}{name} {value}"]
        return "\n".join(lines) + "\n"
