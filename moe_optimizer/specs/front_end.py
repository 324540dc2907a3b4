"""Defines what an API server of a machine was found to take for each token: vLLM's process that sends answers out."""

from __future__ import annotations

import bisect
import math
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

    def of_clients(self, clients: float, *, unknown_us: float) -> Quantity | None:
        """Return the time of a token in us where an API server answers so many clients; None: no load tells it.

        Between two loads it grows with the logarithm of the clients, below the first from `unknown_us` of a quarter of
        its clients on. Above the last it is the last one's.

        Args:
            clients: of each API server.
            unknown_us: what counts where nothing is known.
        """
        if not self.times or _FEWER * clients <= self.times[0].clients:
            return None
        at = bisect.bisect_left([each.clients for each in self.times], clients)
        above = self.times[min(at, len(self.times) - 1)]
        low, low_us = above.clients / _FEWER, min(unknown_us, above.us_per_token)
        if at:
            low, low_us = self.times[at - 1].clients, self.times[at - 1].us_per_token
        share = math.log(clients / low) / math.log(above.clients / low) if low < clients < above.clients else 1.0
        us = low_us + share * (above.us_per_token - low_us)
        return Quantity(us, "us", Source.MEASURED, f"{above.found}, {above.clients} clients")
