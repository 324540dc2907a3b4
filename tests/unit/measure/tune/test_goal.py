"""Goals: how they are written, and how rounds are scored by them."""

from __future__ import annotations

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.tune.goal import figures, parse_goal


def samples(ttft: float, tpot: float, *, tokens: int = 11, duration: float = 1.0, requests: int = 4) -> RoundSamples:
    return RoundSamples(
        duration_s=duration, ttft_s=(ttft,) * requests, e2e_s=(ttft + (tokens - 1) * tpot,) * requests, itl_s=(),
        input_tokens=(5,) * requests, output_tokens=(tokens,) * requests, errors=("",) * requests, energy_j=None,
    )  # fmt: skip


def test_throughput_is_the_geometric_mean_over_loads() -> None:
    loads = [samples(0.1, 0.01), samples(0.1, 0.01, duration=4.0)]
    assert parse_goal("throughput").score(loads) == pytest.approx(22)


def test_latency_is_the_time_to_the_last_token() -> None:
    assert parse_goal("latency").score([samples(0.1, 0.01)]) == pytest.approx(200)


def test_limits_are_as_bad_as_the_worst_of_them() -> None:
    goal = parse_goal("ttft<200ms, tpot<0.005s")
    assert goal.score([samples(0.1, 0.01), samples(0.3, 0.001)]) == pytest.approx(2)
    assert not goal.is_met([2.0, 2.0])
    assert goal.is_met([0.9, 0.8])


def test_figures_are_in_the_units_of_their_names() -> None:
    found = figures([[samples(0.1, 0.01)]])
    expected = {"output_tokens_per_s": 44, "ttft_p99_ms": 100, "e2e_median_ms": 200, "tpot_p99_ms": 10}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "speed", "ttft<0ms", "ttft<5", "ttft<1ms,ttft<2ms", "itl<3ms", "ttft>3ms"])
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--goal"):
        parse_goal(text)
