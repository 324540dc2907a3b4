"""Computes how unevenly experts are used, and the imbalance of ranks that hold whole experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_optimizer.specs.expert_load import ExpertLoad

RANKS = (2, 4, 8)
"""Expert parallel sizes that the imbalance is predicted for."""
BUSIEST_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The imbalance of one layer, or of a model (see `model_figures`)."""

    max_over_mean: float
    """Tokens of the busiest expert over the mean of all: 1 is even, the number of experts is all on one."""
    variation: float
    """Coefficient of variation: standard deviation over mean; 0 is even."""
    gini: float
    """Gini coefficient: 0 is even, near 1 is all on one."""
    busiest_share: float
    """Share of the tokens that the busiest tenth of the experts (at least one) receives."""
    unused: int
    """Experts without a token."""
    rank_imbalance: dict[int, float]
    """Ranks -> tokens of the busiest rank over the mean, with experts in their order on equal ranks; only for
    numbers of ranks that divide the number of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """The figures of one layer; None where it saw no token."""

    index: int
    name: str
    tokens: int
    """Routed tokens: tokens times top-k."""
    figures: LoadFigures | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The figures of a whole expert load."""

    model: str
    num_experts: int
    since: str
    steps: int
    layers: tuple[LayerFigures, ...]
    mean: LoadFigures | None
    """Mean over the layers that saw tokens; for `rank_imbalance` weighted by their tokens, because the layers of a
    step run one after another. None when nothing was counted."""


def load_report(load: ExpertLoad) -> LoadReport:
    """Return the figures of every layer and of the model."""
    layers = tuple(
        LayerFigures(index=layer.index, name=layer.name, tokens=layer.total, figures=load_figures(layer.tokens))
        for layer in load.layers
    )
    return LoadReport(
        model=load.model,
        num_experts=load.num_experts,
        since=load.since,
        steps=load.steps,
        layers=layers,
        mean=_mean(layers),
    )


def load_figures(tokens: Sequence[int]) -> LoadFigures | None:
    """Return the figures of one layer's tokens per expert; None when all are 0: an unused layer has no imbalance."""
    total, count = sum(tokens), len(tokens)
    if total == 0:
        return None
    mean = total / count
    ordered = sorted(tokens)
    busiest = max(1, math.floor(count * BUSIEST_SHARE))
    # Sum over all pairs of |a - b|, over twice the count squared times the mean, for sorted values.
    gini = sum((2 * position - count + 1) * value for position, value in enumerate(ordered)) / (count * total)
    return LoadFigures(
        max_over_mean=ordered[-1] / mean,
        variation=math.sqrt(sum((value - mean) ** 2 for value in tokens) / count) / mean,
        gini=gini,
        busiest_share=sum(ordered[-busiest:]) / total,
        unused=sum(value == 0 for value in tokens),
        rank_imbalance={
            ranks: rank_imbalance(tokens, ranks) for ranks in RANKS if count % ranks == 0 and count >= ranks
        },
    )


def rank_imbalance(tokens: Sequence[int], num_ranks: int) -> float:
    """Return the tokens of the busiest of `num_ranks` ranks over their mean, experts divided in order.

    Raises:
        AssertionError: the experts do not divide evenly, or no token was counted.
    """
    count, total = len(tokens), sum(tokens)
    assert count % num_ranks == 0, f"{count} experts on {num_ranks} ranks"
    assert total > 0, "no token"
    held = count // num_ranks
    return max(sum(tokens[start : start + held]) for start in range(0, count, held)) * num_ranks / total


def _mean(layers: Sequence[LayerFigures]) -> LoadFigures | None:
    used = [(layer.tokens, layer.figures) for layer in layers if layer.figures is not None]
    if not used:
        return None
    figures = [each for _, each in used]
    total = sum(tokens for tokens, _ in used)

    def mean(name: str) -> float:
        return sum(getattr(each, name) for each in figures) / len(figures)

    return LoadFigures(
        max_over_mean=mean("max_over_mean"),
        variation=mean("variation"),
        gini=mean("gini"),
        busiest_share=mean("busiest_share"),
        unused=sum(each.unused for each in figures),
        rank_imbalance={
            ranks: sum(tokens * each.rank_imbalance[ranks] for tokens, each in used) / total
            for ranks in figures[0].rank_imbalance
        },
    )
