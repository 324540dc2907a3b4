"""Axes: every value lies on the axis, in its order, and ticks are round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.measure.report.scale import by_rank, fitting, logarithmic

positive = st.floats(min_value=1e-6, max_value=1e12)


@given(st.lists(positive, min_size=1, max_size=20))
def test_values_keep_their_order_between_0_and_1(values: list[float]):
    scale = fitting(values)
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert places[0] >= 0
    assert places[-1] <= 1
    assert scale.low <= min(values) * (1 + 1e-6)
    assert scale.high >= max(values) * (1 - 1e-6)


@given(positive, positive)
def test_a_logarithmic_axis_holds_both_ends_and_has_ticks(one: float, other: float):
    low, high = sorted((one, other))
    scale = logarithmic(low, high)
    assert scale.low <= low * (1 + 1e-6)
    assert high * (1 - 1e-6) <= scale.high
    assert 1 <= len(scale.ticks) < 25
    assert all(scale.low <= value <= scale.high for value, _ in scale.ticks)


def test_ticks_are_round_numbers():
    assert [name for _, name in fitting([0.0, 43.0]).ticks] == ["0", "10", "20", "30", "40", "50"]
    assert [name for _, name in logarithmic(3.0, 400.0).ticks] == ["2", "5", "10", "20", "50", "100", "200", "500"]


def test_values_far_apart_are_on_a_logarithmic_axis():
    assert fitting([1.0, 1000.0]).logarithmic
    assert not fitting([0.0, 1000.0]).logarithmic


def test_names_have_places_of_their_own():
    scale = by_rank(["1", "16", "64"])
    places = [scale.place(value) for value, _ in scale.ticks]
    assert places == pytest.approx([1 / 6, 3 / 6, 5 / 6])


@pytest.mark.parametrize("values", [[], [-1.0, 2.0]])
def test_no_axis_is_made_of_nothing_or_of_negative_values(values: list[float]):
    with pytest.raises(ValueError, match="expected values"):
        fitting(values)
