"""What a server did between two of its metrics pages."""

from __future__ import annotations

import math
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moe_optimizer.measure.live.activity import Activity, activity, quantile
from moe_optimizer.measure.live.moment import Moment, read_moment

BOUNDS = (0.1, 0.2, 0.4, 0.8)


class Page:
    """The metrics of a server with some engines, in vLLM's names."""

    def __init__(self, *, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        names = ("model_name", "engine")
        self.engines = [("chat", str(number)) for number in range(engines)]
        self._made = {
            "running": Gauge("vllm:num_requests_running", "", names, registry=self.registry),
            "waiting": Gauge("vllm:num_requests_waiting", "", names, registry=self.registry),
            "cache": Gauge("vllm:kv_cache_usage_perc", "", names, registry=self.registry),
            "generated": Counter("vllm:generation_tokens", "", names, registry=self.registry),
            "prompt": Counter("vllm:prompt_tokens", "", names, registry=self.registry),
            "queries": Counter("vllm:prefix_cache_queries", "", names, registry=self.registry),
            "hits": Counter("vllm:prefix_cache_hits", "", names, registry=self.registry),
            "drafted": Counter("vllm:spec_decode_num_drafts", "", names, registry=self.registry),
            "drafts": Counter("vllm:spec_decode_num_draft_tokens", "", names, registry=self.registry),
            "accepted": Counter("vllm:spec_decode_num_accepted_tokens", "", names, registry=self.registry),
            "ttft": Histogram("vllm:time_to_first_token_seconds", "", names, buckets=BOUNDS, registry=self.registry),
        }
        for engine in self.engines:
            self.of("running", engine).set(0)

    def of(self, name: str, engine: tuple[str, str] | None = None) -> Any:
        """Return the metric of an engine; default: the first."""
        return self._made[name].labels(*(engine or self.engines[0]))

    def at(self, seconds: float) -> Moment:
        return read_moment(prometheus_client.generate_latest(self.registry).decode(), seconds=seconds)


def between(page: Page, change: Any, seconds: float = 2.0) -> Activity:
    before = page.at(10.0)
    change()
    return activity(before, page.at(10.0 + seconds))


def test_rates_are_what_was_counted_over_the_seconds_between() -> None:
    page = Page()
    page.of("generated").inc(1000)

    def work() -> None:
        page.of("generated").inc(300)
        page.of("prompt").inc(50)
        page.of("running").set(3)

    seen = between(page, work)
    assert (seen.output_tokens_per_s, seen.prompt_tokens_per_s, seen.running) == (150, 25, 3)
    assert seen.model == "chat"


def test_the_engines_of_a_server_are_added_and_their_caches_averaged() -> None:
    page = Page(engines=2)

    def work() -> None:
        for engine, share in zip(page.engines, (0.2, 0.6), strict=True):
            page.of("generated", engine).inc(10)
            page.of("cache", engine).set(share)

    seen = between(page, work)
    assert seen.output_tokens_per_s == 10
    assert seen.cache_share == pytest.approx(0.4)


def test_times_are_those_of_the_interval_alone() -> None:
    page = Page()
    for _ in range(1000):
        page.of("ttft").observe(0.7)
    seen = between(page, lambda: [page.of("ttft").observe(0.15) for _ in range(10)])
    assert seen.ttft.median_ms is not None
    assert 100 < seen.ttft.median_ms <= 200
    assert seen.tpot.median_ms is None


def test_a_server_that_was_started_anew_counts_from_zero() -> None:
    old, new = Page(), Page()
    old.of("generated").inc(1000)
    old.of("ttft").observe(0.7)
    new.of("generated").inc(40)
    new.of("ttft").observe(0.05)
    seen = activity(old.at(0.0), new.at(2.0))
    assert seen.output_tokens_per_s == 20
    assert seen.ttft.median_ms is not None
    assert seen.ttft.median_ms <= 100


def test_prefix_hits_are_a_share_of_what_was_looked_up() -> None:
    page = Page()
    assert between(page, lambda: None).prefix_hit_share is None

    def work() -> None:
        page.of("queries").inc(80)
        page.of("hits").inc(20)

    assert between(page, work).prefix_hit_share == 0.25


def test_drafts_and_accepted_ones_are_of_a_step_of_a_request() -> None:
    page = Page()
    assert between(page, lambda: None).drafts_per_step is None

    def work() -> None:
        page.of("drafted").inc(10)
        page.of("drafts").inc(30)
        page.of("accepted").inc(12)

    seen = between(page, work)
    assert (seen.drafts_per_step, seen.accepted_per_step) == (3.0, 1.2)


@given(
    st.lists(st.floats(0.001, 0.79, allow_subnormal=False), min_size=1, max_size=50),
    st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.99, 1.0)),
)
def test_a_quantile_lies_in_the_bucket_of_the_observation_that_it_stands_for(times: list[float], share: float) -> None:
    counts = {bound: float(sum(each <= bound for each in times)) for bound in (*BOUNDS, math.inf)}
    found = quantile(counts, share)
    exact = sorted(times)[max(math.ceil(share * len(times)) - 1, 0)]
    upper = next(bound for bound in BOUNDS if exact <= bound)
    lower = max((bound for bound in BOUNDS if bound < upper), default=0.0)
    assert found is not None
    assert lower - 1e-12 <= found <= upper + 1e-12


def test_a_quantile_above_the_last_bound_is_that_bound() -> None:
    assert quantile({0.1: 1.0, 0.2: 1.0, math.inf: 10.0}, 0.9) == 0.2
    assert quantile({0.1: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None
