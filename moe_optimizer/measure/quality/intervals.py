"""Gives estimates over positions with bootstrap intervals that respect whole prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 500

Statistic = Callable[[NDArray[np.float64]], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with the interval that holds it with 95 % confidence; None: not a finite number."""

    value: float | None
    low: float | None
    high: float | None


def estimate(values: NDArray[np.float64], sequences: NDArray[np.int32], statistic: Statistic) -> Estimate:
    """Return a statistic over positions, with a percentile bootstrap that draws whole prompts.

    Positions of one prompt share what precedes them, so that drawing them one by one would promise too much.

    Args:
        values: [P], one for each position.
        sequences: [P], its prompt; ascending.
        statistic: of values.

    Raises:
        ValueError: there are no values.
    """
    if not values.size:
        raise ValueError("no values")
    whole = statistic(values)
    if not np.isfinite(values).all():
        return Estimate(_finite(whole), None, None)
    _, starts = np.unique(sequences, return_index=True)
    groups = np.split(values, starts[1:])
    generator = np.random.default_rng(0)
    drawn = [
        statistic(np.concatenate([groups[each] for each in generator.integers(len(groups), size=len(groups))]))
        for _ in range(_RESAMPLES if len(groups) > 1 else 1)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(whole, float(low), float(high))


def mean(values: NDArray[np.float64]) -> float:
    """Return the mean."""
    return float(values.mean())


def exp_mean(values: NDArray[np.float64]) -> float:
    """Return the exponential of the mean: of losses in nats the ratio of perplexities."""
    return float(np.exp(values.mean()))


def p99(values: NDArray[np.float64]) -> float:
    """Return the 99th percentile: a value that occurs, the next above where it lies between two."""
    return float(np.quantile(values, 0.99, method="higher"))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
