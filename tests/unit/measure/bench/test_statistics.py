"""Verdicts: what is there is found, what is not there is not claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_optimizer.measure.bench.statistics import gain, spread


def rounds(seed: int, count: int, *, factor: float = 1.0, noise: float = 0.02, drift: float = 0.2) -> list[list[float]]:
    """Two sides, pair by pair: the machine drifts far from pair to pair, and each round has noise of its own."""
    generator = np.random.default_rng(seed)
    common = np.exp(drift * generator.standard_normal(count))
    own = np.exp(noise * generator.standard_normal((2, count)))
    return [list(10 * common * own[0] / factor), list(10 * common * own[1])]


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_against_a_finds_no_difference_in_19_of_20_runs(count):
    runs, loads = 200, 4
    wrong = 0
    for run in range(runs):
        verdicts = [
            gain(*rounds(run * loads + load, count), higher_is_better=False, comparisons=loads) for load in range(loads)
        ]
        wrong += any(each.verdict != "no difference shown" for each in verdicts)
    # 5 % of 200 runs are 10; 18 or more would come once in a hundred times.
    assert wrong < 18


@pytest.mark.parametrize(("higher", "word"), [(False, "faster"), (True, "slower")])
def test_a_gain_far_above_the_noise_is_found_though_the_machine_drifts_more(higher, word):
    found = [gain(*rounds(seed, 5, factor=1.15), higher_is_better=higher, comparisons=4).verdict for seed in range(40)]
    assert found.count(word) >= 38


def test_the_ratio_is_that_of_the_sides_whatever_the_metric():
    time = gain([5.0, 5.1, 4.9], [10.0, 10.3, 9.7], higher_is_better=False, comparisons=1)
    rate = gain([200.0, 196.0, 204.0], [100.0, 97.0, 103.0], higher_is_better=True, comparisons=1)
    assert time.ratio == pytest.approx(2.0, rel=0.02)
    assert rate.ratio == pytest.approx(2.0, rel=0.02)
    assert time.low < time.ratio < time.high


def test_more_verdicts_in_a_run_widen_each_interval():
    one, many = (gain(*rounds(1, 5), higher_is_better=False, comparisons=number) for number in (1, 12))
    assert math.log(many.high / many.low) > 1.5 * math.log(one.high / one.low)


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_what_cannot_be_compared_is_refused(ours, theirs):
    with pytest.raises(ValueError, match="pairs"):
        gain(ours, theirs, higher_is_better=True, comparisons=1)


def test_the_interval_of_a_median_holds_it_nearly_always():
    inside = 0
    for seed in range(60):
        values = np.random.default_rng(seed).exponential(size=80)
        found = spread(list(values))
        inside += found.low <= math.log(2) <= found.high
    assert inside >= 52


def test_one_value_is_its_own_distribution():
    found = spread([3.0])
    assert (found.median, found.low, found.high, found.p90, found.p99) == (3.0, 3.0, 3.0, 3.0, 3.0)
