"""Intervals over positions that belong to prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.measure.quality.intervals import Estimate, estimate, exp_mean, mean, p99


def test_prompts_are_drawn_whole() -> None:
    """Positions of a prompt are alike: drawn one by one they would promise ten times as much."""
    generator = np.random.default_rng(1)
    of_prompts = generator.normal(size=12)
    values, sequences = np.repeat(of_prompts, 100), np.repeat(np.arange(12, dtype=np.int32), 100)
    whole = estimate(values, sequences, mean)
    single = estimate(values, np.arange(1200, dtype=np.int32), mean)
    assert whole.low is not None
    assert whole.high is not None
    assert single.low is not None
    assert single.high is not None
    assert whole.high - whole.low > 5 * (single.high - single.low)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    generator, held = np.random.default_rng(2), 0
    for _ in range(60):
        values = np.repeat(generator.normal(size=40), 5) + generator.normal(size=200)
        found = estimate(values, np.repeat(np.arange(40, dtype=np.int32), 5), mean)
        held += found.low is not None and found.high is not None and found.low <= 0 <= found.high
    assert held >= 51


@settings(max_examples=20)
@given(st.lists(st.floats(0, 10), min_size=2, max_size=40))
def test_an_estimate_lies_in_what_was_seen(values: list[float]) -> None:
    data = np.array(values)
    for statistic in (mean, p99):
        found = estimate(data, np.arange(len(data), dtype=np.int32), statistic)
        assert found.value is not None
        assert data.min() - 1e-9 <= found.value <= data.max() + 1e-9


def test_a_position_without_a_number_leaves_no_interval() -> None:
    values, sequences = np.array([0.1, np.inf]), np.arange(2, dtype=np.int32)
    assert estimate(values, sequences, mean) == Estimate(None, None, None)
    assert estimate(values, sequences, exp_mean).value is None


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate(np.empty(0), np.empty(0, dtype=np.int32), mean)
