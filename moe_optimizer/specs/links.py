"""Holds how long the collectives between GPUs of one machine were measured to take, by size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "gather"]
"""gather: an all-gather or a reduce-scatter, each half of an all-reduce's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """The collectives of so many equal devices of a machine."""

    device: str
    """GPU as the driver names it; or the processor, whose processes exchange through memory."""
    num_devices: int
    versions: str
    """Of what computes the collectives."""
    all_reduce_us: Mapping[int, float]
    """Bytes that each device holds -> time in microseconds, ascending."""
    gather_us: Mapping[int, float]
    """Bytes of all devices together -> mean time of an all-gather and a reduce-scatter, ascending."""
    source: str
    """When it was measured."""

    def times_us(self, kind: Collective) -> Mapping[int, float]:
        """Return the times of one kind by size."""
        return self.all_reduce_us if kind == "all_reduce" else self.gather_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What was measured of a machine's links."""

    tables: tuple[LinkTimes, ...] = ()

    def find(self, device: str, num_devices: int) -> LinkTimes | None:
        """Return what was measured of so many of these devices."""
        wanted = (device, num_devices)
        return next((each for each in self.tables if (each.device, each.num_devices) == wanted), None)


def time_between(times_us: Mapping[int, float], num_bytes: float) -> float:
    """Return the time of a size between measured ones by a power law; outside them the nearest one's."""
    sizes = list(times_us)
    within = min(max(num_bytes, sizes[0]), sizes[-1])
    for low, high in itertools.pairwise(sizes):
        if within <= high:
            share = math.log(within / low) / math.log(high / low)
            return times_us[low] * (times_us[high] / times_us[low]) ** share
    return times_us[sizes[-1]]
