"""The figures of a load against their definitions."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moe_optimizer.costs.expert_imbalance import LoadFigures, load_figures, load_report, rank_imbalance
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad

TOKENS = st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(any)


def figures(*tokens: int) -> LoadFigures:
    found = load_figures(tokens)
    assert found is not None
    return found


@given(tokens=TOKENS)
def test_the_gini_coefficient_is_the_mean_difference_of_all_pairs(tokens: list[int]) -> None:
    mean = sum(tokens) / len(tokens)
    pairs = sum(abs(one - other) for one in tokens for other in tokens)
    assert figures(*tokens).gini == pytest.approx(pairs / (2 * len(tokens) ** 2 * mean), abs=1e-9)


@given(tokens=TOKENS, factor=st.integers(1, 1000))
def test_figures_do_not_depend_on_how_long_was_counted(tokens: list[int], factor: int) -> None:
    one, more = figures(*tokens), figures(*(factor * value for value in tokens))
    assert more.gini == pytest.approx(one.gini)
    assert more.variation == pytest.approx(one.variation)
    assert more.max_over_mean == pytest.approx(one.max_over_mean)
    assert more.rank_imbalance == pytest.approx(one.rank_imbalance)


@given(tokens=TOKENS)
def test_every_figure_stays_within_its_bounds(tokens: list[int]) -> None:
    found = figures(*tokens)
    assert 1 <= found.max_over_mean <= len(tokens) + 1e-9
    assert -1e-9 <= found.gini < 1
    assert 0 < found.busiest_share <= 1 + 1e-9
    for ranks, imbalance in found.rank_imbalance.items():
        assert 1 - 1e-9 <= imbalance <= ranks + 1e-9


def test_an_even_load_has_no_imbalance() -> None:
    found = figures(*[5] * 20)
    assert (found.max_over_mean, found.variation, found.gini, found.unused) == (1, 0, 0, 0)
    assert found.busiest_share == pytest.approx(0.1)
    assert found.rank_imbalance == {2: 1, 4: 1}


def test_all_on_one_expert_is_the_worst_imbalance() -> None:
    found = figures(0, 0, 0, 0, 0, 0, 0, 9)
    assert found.max_over_mean == 8
    assert found.variation == pytest.approx(math.sqrt(7))
    assert found.busiest_share == 1
    assert found.unused == 7
    assert found.rank_imbalance == {2: 2, 4: 4, 8: 8}


def test_ranks_hold_experts_in_their_order() -> None:
    assert rank_imbalance([3, 3, 1, 1], 2) == 1.5
    assert rank_imbalance([3, 1, 3, 1], 2) == 1.0


def test_a_number_of_ranks_that_does_not_divide_the_experts_is_left_out() -> None:
    assert set(figures(1, 2, 3, 4, 5, 6).rank_imbalance) == {2}
    assert set(figures(1, 2, 3).rank_imbalance) == set()


def test_a_layer_without_tokens_has_no_figures_and_does_not_enter_the_mean() -> None:
    assert load_figures([0, 0]) is None
    layers = (LayerLoad(index=0, name="a", tokens=(0, 0)), LayerLoad(index=1, name="b", tokens=(1, 3)))
    report = load_report(ExpertLoad(model="m", num_experts=2, layers=layers, since="2026-11-20T10:00Z", steps=1))
    assert report.layers[0].figures is None
    assert report.mean is not None
    assert report.mean.max_over_mean == 1.5
    assert report.mean.unused == 0


def test_the_rank_imbalance_of_a_model_weighs_layers_by_their_tokens() -> None:
    layers = (LayerLoad(index=0, name="a", tokens=(30, 10)), LayerLoad(index=1, name="b", tokens=(5, 5)))
    report = load_report(ExpertLoad(model="m", num_experts=2, layers=layers, since="2026-11-20T10:00Z", steps=1))
    assert report.mean is not None
    assert report.mean.rank_imbalance[2] == pytest.approx((40 * 1.5 + 10 * 1.0) / 50)


def test_nothing_counted_has_no_mean() -> None:
    load = ExpertLoad(model="m", num_experts=2, layers=(), since="2026-11-20T10:00Z", steps=0)
    assert load_report(load).mean is None
