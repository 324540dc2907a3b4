"""What is seen of a real server from outside: `top`, and the dashboard's queries in a real Prometheus."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import MAX_TOKENS, PROMPTS, Served
from tests.vllm.scraped import Watched


def watched(served: Served) -> Watched:
    assert served.watched is not None
    return served.watched


def test_top_counts_what_was_asked(ours_fp32: Served) -> None:
    seen = watched(ours_fp32).activity
    assert (seen.finished, seen.running, seen.waiting, seen.preemptions) == (len(PROMPTS), 0, 0, 0)
    assert 0 < seen.output_tokens_per_s * seen.seconds <= len(PROMPTS) * MAX_TOKENS * 1.001
    assert seen.prompt_tokens_per_s > 0
    for times in (seen.ttft, seen.tpot):
        assert times.median_ms is not None
        assert times.p99_ms is not None
        assert 0 < times.median_ms <= times.p99_ms
    assert 0 <= seen.cache_share <= 1


def test_top_shows_what_our_plugin_did(ours_fp32: Served) -> None:
    seen = watched(ours_fp32).activity
    assert seen.passes["flash_dmoe"] == seen.passes["expert_load"] == "ran"
    assert seen.kernels == {"1+ tokens, fp32": "fused_experts (cpu)"}
    # This server was not warmed up.
    assert seen.compiled_after_ready is not None
    assert seen.worst_imbalance is not None
    assert seen.worst_imbalance > 1


def test_every_query_of_the_dashboard_finds_series(ours_fp32: Served) -> None:
    found = watched(ours_fp32).found
    if found is None:
        pytest.skip("no prometheus on this machine (Debian: apt-get install prometheus)")
    assert [query for query, series in found.items() if not series] == []
