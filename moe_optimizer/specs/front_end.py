"""Defines what an API server of a machine was found to take for each token: vLLM's process that sends answers out."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.specs.quantity import Quantity, Source

_FEWER = 2
"""Chosen: a load tells of loads down to half its clients, as an API server takes less for each token of fewer: 40 us of
128 clients and 67 of 512 (benchmarks/records/2026-11-28_h200_front_end.json)."""


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
    """What is known of a machine's API servers, at most one time for each number of clients."""

    times: tuple[FrontEndTime, ...] = ()

    def of_clients(self, clients: float) -> Quantity | None:
        """Return the time of a token in us where an API server answers so many clients; None: no load tells it."""
        near = [each for each in self.times if each.clients <= _FEWER * clients]
        if not near:
            return None
        told = max(near, key=lambda each: each.clients)
        return Quantity(told.us_per_token, "us", Source.MEASURED, f"{told.found}, {told.clients} clients")
