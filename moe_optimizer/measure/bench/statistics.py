"""Compares two servers by rounds that were measured in pairs, and says what the difference shows."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
"""That no verdict of a run claims a difference where there is none."""
CURVE_POINTS = 21
"""Of a distribution: one for every 5 % of its values."""
_RESAMPLES = 2000
_DRAWS = 1_000_000
_FAR = 1000.0
"""Chosen: no server is so much faster than another."""

Word = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution over requests: its median with an interval, and two tails."""

    median: float
    low: float
    high: float
    """Of the bootstrap interval of the median (95 %)."""
    p90: float
    p99: float
    curve: tuple[float, ...] = ()
    """The values that 0, 5, 10 ... 100 % of the requests stay within."""


def spread(values: Sequence[float]) -> Spread:
    """Return the distribution of `values`; the interval of the median is a percentile bootstrap over the values.

    Raises:
        ValueError: there are none.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("no values")
    generator = np.random.default_rng(0)
    left, medians = _RESAMPLES if data.size > 1 else 1, []
    while left:
        several = min(left, max(1, _DRAWS // data.size))
        medians.append(np.median(generator.choice(data, (several, data.size)), axis=1))
        left -= several
    low, high = np.quantile(np.concatenate(medians), [0.025, 0.975])
    p90, p99 = np.quantile(data, [0.9, 0.99])
    curve = tuple(map(float, np.quantile(data, np.linspace(0, 1, CURVE_POINTS))))
    return Spread(float(np.median(data)), float(low), float(high), float(p90), float(p99), curve)


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster one side is: above 1 is faster, whatever the metric."""

    ratio: float
    low: float
    high: float
    verdict: Word


def gain(
    ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool, comparisons: int, least: float = 1.0
) -> Gain:
    """Compare the rounds of two sides that were measured side by side, pair by pair.

    A machine drifts from minute to minute, which both rounds of a pair share: what is compared is the ratio within
    each pair. Its interval is Student's on the logarithms, the widest that few pairs demand. `comparisons` verdicts
    share one confidence (Bonferroni), so that a run of A against A finds nothing at all in 19 of 20 runs.

    Args:
        ours: one value for each round; in the order of `theirs`.
        theirs: the rounds that they are compared with.
        higher_is_better: tokens per second, not milliseconds.
        comparisons: verdicts of the whole run.
        least: a gain below this factor is not worth a verdict.

    Raises:
        ValueError: fewer than two pairs, or a value that is not positive.
    """
    if len(ours) != len(theirs) or len(ours) < 2 or min(*ours, *theirs) <= 0:
        raise ValueError(f"expected two or more pairs of positive values, got {ours} and {theirs}")
    sign = 1.0 if higher_is_better else -1.0
    logs = [sign * math.log(mine / other) for mine, other in zip(ours, theirs, strict=True)]
    center = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = error * _student_quantile(len(logs) - 1, 1 - (1 - CONFIDENCE) / (2 * comparisons))
    low, high = math.exp(center - half), math.exp(center + half)
    word: Word = "faster" if low > least else "slower" if high < 1 / least else "no difference shown"
    return Gain(math.exp(center), low, high, word)


def ratio_in_words(ratio: float) -> str:
    """Return a ratio for a table; of one that few rounds leave open, its magnitude alone."""
    return f"{ratio:.3f}" if 1 / _FAR < ratio < _FAR else f"{ratio:.0e}"


@functools.lru_cache
def _student_quantile(degrees: int, probability: float) -> float:
    """Return a quantile of Student's distribution, from a million seeded draws: no table, no further dependency."""
    draws = np.random.default_rng(0).standard_t(degrees, _DRAWS)
    return float(np.quantile(np.abs(draws), 2 * probability - 1))
