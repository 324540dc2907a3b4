"""Puts on /metrics how many requests an API server has handed to its engines and has no end of.

vLLM's own counts of running and waiting requests are what an engine said last: they stay 0 when one that stands still
is given a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from prometheus_client import Gauge

from moe_optimizer.proof.record import UNFINISHED_METRIC

_INTERVAL_S = 1.0
"""Chosen: as often as the launcher asks; the page of another API server has what this one last said."""
_shown: UnfinishedRequests | None = None


class UnfinishedRequests:
    """The count of one API server; of several the page has the sum.

    Args:
        client: vLLM's, of its engines.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._model_name = str(client.model_config.served_model_name)
        self._gauge = Gauge(
            UNFINISHED_METRIC,
            "Requests handed to an engine that have not ended, also if it stands still.",
            labelnames=("model_name", "engine"),
            multiprocess_mode="livesum",
        )
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def update(self) -> None:
        """Have the page say what is so now."""
        for engine, count in unfinished_of(self._client).items():
            self._gauge.labels(self._model_name, engine).set(count)

    async def _follow(self) -> None:
        while True:
            self.update()
            await asyncio.sleep(_INTERVAL_S)


def show_unfinished(app: Any) -> None:
    """Keep the count on the page, from the first call on. A vLLM that does not count has none.

    Args:
        app: vLLM's, which has the client of its engines.
    """
    global _shown  # noqa: PLW0603 - one page for each process
    if _shown is None:
        client = getattr(getattr(app, "state", None), "engine_client", None)
        if not hasattr(client, "get_num_unfinished_requests"):
            return
        _shown = UnfinishedRequests(client)
    _shown.update()


def unfinished_of(client: Any) -> Counter[str]:
    """Return how many requests each engine of vLLM's client has, by the engine's number."""
    engines = getattr(client.engine_core, "engine_ranks_managed", (0,))
    counts = Counter({str(engine): 0 for engine in engines})
    if len(counts) == 1:
        (only,) = counts
        return Counter({only: client.get_num_unfinished_requests()})
    chosen = getattr(client.engine_core, "reqs_in_flight", {})
    counts.update(str(int.from_bytes(engine, "little")) for engine in list(chosen.values()))
    return counts
