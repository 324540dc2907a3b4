"""`Metrics`: counts and times in Prometheus' text format, named as vLLM names them behind another prefix."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moe_optimizer.engine.async_llm import Indexed
from moe_optimizer.engine.llm_engine import LLMEngine

_REQUESTS = ("request_success", "request_aborted", "request_failed")
_COUNTED = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", *_REQUESTS)
_TIMED = ("time_to_first_token_seconds", "e2e_request_latency_seconds")


class Metrics:
    """Watches the outputs of an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        scheduler, self._registry = engine.scheduler, CollectorRegistry()
        read = {
            "num_requests_running": lambda: len(scheduler.running),
            "num_requests_waiting": lambda: len(scheduler.waiting),
            "kv_cache_usage_perc": lambda: 1 - scheduler.blocks.num_available / scheduler.blocks.num_blocks,
            "num_preemptions_total": lambda: scheduler.num_preemptions,
        }
        for name, value in read.items():
            self._made(Gauge, name).set_function(value)
        self.counts: dict[str, Counter] = {name: self._made(Counter, name) for name in _COUNTED}
        self._times: dict[str, Histogram] = {name: self._made(Histogram, name) for name in _TIMED}

    async def watch(self, outputs: AsyncGenerator[Indexed], count: int) -> AsyncGenerator[Indexed]:
        """Yield the outputs of `count` requests that begin now, and count them."""
        counts, started, begun, unfinished = self.counts, time.monotonic(), set[int](), count
        try:
            async for position, output in outputs:
                if position not in begun:
                    self._times["time_to_first_token_seconds"].observe(time.monotonic() - started)
                begun.add(position)
                counts["generation_tokens"].inc(sum(len(sample.token_ids) for sample in output.outputs))
                if output.finished:
                    unfinished -= 1
                    counts["prompt_tokens"].inc(len(output.prompt_token_ids))
                    counts["prompt_tokens_cached"].inc(output.num_cached_tokens)
                    self._times["e2e_request_latency_seconds"].observe(time.monotonic() - started)
                yield position, output
        finally:
            counts["request_success"].inc(count - unfinished)
            counts["request_aborted"].inc(unfinished)
            await outputs.aclose()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _made(self, kind: type, name: str) -> Any:
        return kind(f"moe_optimizer:{name}", name.replace("_", " "), registry=self._registry)
