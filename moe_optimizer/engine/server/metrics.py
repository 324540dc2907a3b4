"""`Metrics`: counts and times in Prometheus' text format, named as vLLM names them behind another prefix."""

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_optimizer.engine.async_llm import Indexed
from moe_optimizer.engine.llm_engine import LLMEngine
from moe_optimizer.errors import MoeOptimizerError

_TOKENS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
_REQUESTS = ("request_success", "request_aborted", "request_failed")
_TIMED = ("time_to_first_token_seconds", "e2e_request_latency_seconds")


class Metrics(Collector):
    """Watches the outputs of an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._scheduler, self._registry = engine.scheduler, CollectorRegistry()
        self._registry.register(self)
        self._counts = {name: self._made(Counter, name, registry=self._registry) for name in _TOKENS + _REQUESTS}
        self._times = {name: self._made(Histogram, name, registry=self._registry) for name in _TIMED}

    def collect(self) -> Iterator[Metric]:
        """Yield what is read of the scheduler; the registry asks."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        yield self._made(GaugeMetricFamily, "num_requests_running", value=len(scheduler.running))
        yield self._made(GaugeMetricFamily, "num_requests_waiting", value=len(scheduler.waiting))
        yield self._made(GaugeMetricFamily, "kv_cache_usage_perc", value=1 - blocks.num_available / blocks.num_blocks)
        yield self._made(CounterMetricFamily, "num_preemptions", value=scheduler.num_preemptions)

    async def watch(self, outputs: AsyncGenerator[Indexed], count: int) -> AsyncGenerator[Indexed]:
        """Yield the outputs of `count` requests that begin now, and count them."""
        counts, started, begun, unfinished = self._counts, time.monotonic(), set[int](), count
        ended = "request_aborted"
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
        except MoeOptimizerError:
            ended = "request_failed"
            raise
        finally:
            counts["request_success"].inc(count - unfinished)
            counts[ended].inc(unfinished)
            await outputs.aclose()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _made(self, kind: type, name: str, **options: Any) -> Any:
        return kind(f"moe_optimizer:{name}", name.replace("_", " "), **options)
