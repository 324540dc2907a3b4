"""Collects SIGINT and SIGTERM, so that they raise no exception in the middle of anything."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class StopRequestedError(Exception):
    """A stop of the servers was requested; not a failure."""


@contextlib.contextmanager
def collected_stops() -> Iterator[list[int]]:
    """Give the SIGINTs and SIGTERMs that have come since the block began; nothing else happens on them."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
