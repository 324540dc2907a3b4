"""Defines what an API server of a machine was found to take for each token: vLLM's process that sends answers out."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_optimizer.specs.quantity import Quantity, Source

_FEWER = 4
"""Chosen: of how many times fewer clients a load tells nothing. An API server takes less for each token of fewer: 40 us
of 128 clients and 67 of 512 (benchmarks/records/2026-11-28_h200_front_end.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndTime:
    """What an API server took for a token under one load."""

    clients: int
    """That it answered at once."""
    us_per_token: float
    """Microseconds of wall time, while tokens waited for it."""
    found: str
    """When and by whom, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """What is known of a machine's API servers."""

    times: tuple[FrontEndTime, ...] = ()
    """Ascending in `clients`, at most one for each number of them."""

    def of_clients(self, clients: float, modelled: Callable[[float], float]) -> Quantity | None:
        """Return the time of a token in us where an API server answers so many clients; None: no load tells it.

        What is found is a ratio to what counts where nothing is known. Between two loads it follows the logarithm of
        the clients, below the first one it comes from 1 at a quarter of its clients; above the last it is the last
        one's.

        Args:
            clients: of each API server.
            modelled: what counts where nothing is known, in us, of so many clients.
        """
        if not self.times or _FEWER * clients <= self.times[0].clients:
            return None
        ratios = [(each.clients, each.us_per_token / modelled(each.clients)) for each in self.times]
        points = [(self.times[0].clients / _FEWER, 1.0), *ratios]
        at = min(bisect.bisect_left([many for many, _ in points], clients), len(points) - 1)
        (low, low_ratio), (high, high_ratio) = points[at - 1], points[at]
        share = min(1.0, math.log(clients / low) / math.log(high / low))
        ratio = low_ratio + share * (high_ratio - low_ratio)
        told = self.times[at - 1]
        return Quantity(modelled(clients) * ratio, "us", Source.MEASURED, f"{told.found}, {told.clients} clients")
