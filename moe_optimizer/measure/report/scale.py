"""Places values on an axis: linear, logarithmic or by rank, with round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDE = 15.0
"""Largest value over smallest from which on a logarithmic axis reads better."""

_FEW_DECADES = 1500.0
"""Largest value over smallest up to which a logarithmic axis has ticks at 2 and 5 too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values and their places between 0 and 1."""

    ticks: tuple[tuple[float, str], ...]
    """Value and how it is written."""
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at `low`, 1 at `high`; values beyond are brought to the end."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def by_rank(names: Sequence[str]) -> Scale:
    """Return a scale on which each name has a place of its own, at its position."""
    ticks = tuple((float(number), name) for number, name in enumerate(names))
    return Scale(ticks=ticks, low=-0.5, high=len(names) - 0.5)


def fitting(values: Sequence[float], *, unit: str = "") -> Scale:
    """Return a linear scale from 0, or a logarithmic one where values are far apart.

    Raises:
        ValueError: there is no value, or one is negative.
    """
    if not values or min(values) < 0:
        raise ValueError(f"expected values from 0 on, got {values}")
    positive = [value for value in values if value > 0] or [1.0]
    if len(positive) == len(values) and max(positive) / min(positive) > _WIDE:
        return logarithmic(min(positive), max(positive), unit=unit)
    step = _round_up(max(positive) / 5)
    count = math.ceil(max(positive) / step - 1e-9)
    ticks = tuple((step * number, _label(step * number) + unit) for number in range(count + 1))
    return Scale(ticks=ticks, low=0.0, high=step * count)


def logarithmic(low: float, high: float, *, unit: str = "") -> Scale:
    """Return a logarithmic scale that has `low` and `high` inside.

    Raises:
        ValueError: not 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"expected 0 < low <= high, got {low} and {high}")
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [digit * 10.0**power for power in range(first, max(last, first + 1) + 1) for digit in (1, 2, 5)]
    start = max(tick for tick in every if tick <= low * (1 + 1e-9))
    end = min(tick for tick in every if tick >= high * (1 - 1e-9) and tick > start)
    inside = [tick for tick in every if start <= tick <= end]
    decades = [tick for tick in inside if math.isclose(math.log10(tick), round(math.log10(tick)), abs_tol=1e-9)]
    shown = inside if end / start <= _FEW_DECADES else decades
    ticks = tuple((tick, _label(tick) + unit) for tick in shown)
    return Scale(ticks=ticks, low=start, high=end, logarithmic=True)


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= value * (1 - 1e-9))


def _label(value: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
