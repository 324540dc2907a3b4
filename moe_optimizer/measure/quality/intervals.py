"""Gives estimates over positions with bootstrap intervals that respect whole prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 500
_CHUNK = 1 << 17
"""Counts of positions that are looked at together, 1 MiB: chosen, it stays in a cache."""

Statistic = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
"""Of P values, for each of R rows that say how often each value was drawn: [P], [R, P] -> [R]."""


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
    whole = float(statistic(values, np.ones((1, values.size)))[0])
    if not np.isfinite(values).all():
        return Estimate(_finite(whole), None, None)
    _, group = np.unique(sequences, return_inverse=True)
    num_groups = int(group.max()) + 1
    resamples = _RESAMPLES if num_groups > 1 else 1
    generator, drawn = np.random.default_rng(0), []
    for rows in _chunks(resamples, _CHUNK // values.size):
        places = generator.integers(num_groups, size=(rows, num_groups)) + num_groups * np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=rows * num_groups).reshape(rows, num_groups)
        drawn.append(statistic(values, counts.astype(float)[:, group]))
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return Estimate(whole, float(low), float(high))


def mean(values: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean."""
    return counts @ values / counts.sum(axis=1)


def exp_mean(values: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the exponential of the mean: of losses in nats the ratio of perplexities."""
    return np.exp(mean(values, counts))


def p99(values: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the 99th percentile: a value that occurs, the next above where it lies between two."""
    order = np.argsort(values)
    up_to = counts[:, order].cumsum(axis=1)
    place = np.ceil(0.99 * (up_to[:, -1:] - 1))
    return values[order[(up_to > place).argmax(axis=1)]]


def _chunks(total: int, most: int) -> Iterator[int]:
    """Yield numbers of at most `most`, and at least 1, whose sum is `total`."""
    while total > 0:
        yield min(total, max(most, 1))
        total -= max(most, 1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
