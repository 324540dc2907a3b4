"""Holds a number with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Where a number comes from, strongest first. Combining two numbers keeps the weaker."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    MODELLED = "modelled"
    ASSUMED = "assumed"

    @property
    def weakness(self) -> int:
        """0 for the strongest source, growing as the evidence weakens."""
        return _WEAKNESS[self]

    def __or__(self, other: Source) -> Source:
        """Return the weaker of the two sources."""
        return max(self, other, key=lambda source: source.weakness)


_WEAKNESS = {source: place for place, source in enumerate(Source)}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with unit, source and reference. No field has a default: a number without a source is a guess."""

    value: float
    unit: str
    """For example "bytes", "bytes/s", "flop/s", "us", "ratio"."""
    source: Source
    ref: str
    """Where exactly: a datasheet, a record file, or the formula and its inputs."""

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.unit} ({self.source.value}: {self.ref})"


def number_of(count: int, what: str) -> str:
    """Return "1 request" or "2 requests"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def bytes_in_words(count: float) -> str:
    """Return a size with three digits and its unit, for example "61.1 GB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        # What would be rounded up to a thousand of a unit is one of the next.
        if abs(count) >= 0.9995 * factor:
            return f"{count / factor:.3g} {unit}" if abs(count) < 999.5 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} B"
