"""`Metrics`: counts and times in Prometheus' text format, named as vLLM names them behind another prefix."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator

from moe_optimizer.engine.llm_engine import LLMEngine
from moe_optimizer.engine.outputs import RequestOutput

_PREFIX = "moe_optimizer:"
_COUNTERS = (
    "prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total", "request_success_total",
    "request_aborted_total", "request_failed_total", "time_to_first_token_seconds_sum",
    "e2e_request_latency_seconds_sum",
)  # fmt: skip


class Metrics:
    """Watches the streams of an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.counts: Counter[str] = Counter()

    async def watch(self, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Yield what the stream yields, and count it."""
        counts, started, first = self.counts, time.monotonic(), True
        outcome = "request_aborted_total"
        try:
            async for output in stream:
                if first:
                    counts["time_to_first_token_seconds_sum"] += time.monotonic() - started  # type: ignore[operator]
                first = False
                counts["generation_tokens_total"] += sum(len(sample.token_ids) for sample in output.outputs)
                if output.finished:
                    outcome = "request_success_total"
                    counts["prompt_tokens_total"] += len(output.prompt_token_ids)
                    counts["prompt_tokens_cached_total"] += output.num_cached_tokens
                    counts["e2e_request_latency_seconds_sum"] += time.monotonic() - started  # type: ignore[operator]
                yield output
        finally:
            counts[outcome] += 1
            await stream.aclose()  # type: ignore[attr-defined]

    def text(self) -> str:
        """Return all of them."""
        scheduler = self._engine.scheduler
        values: dict[str, float] = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": 1 - scheduler.blocks.num_available / scheduler.blocks.num_blocks,
            "num_preemptions_total": scheduler.num_preemptions,
            **{name: self.counts[name] for name in _COUNTERS},
        }
        lines = []
        for name, value in values.items():
            kind = "counter" if name.endswith(("_total", "_sum")) else "gauge"
            lines += [f"# TYPE {_PREFIX}{name} {kind}", f"{_PREFIX}{name} {value}"]
        return "\n".join(lines) + "\n"
