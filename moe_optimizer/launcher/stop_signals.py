"""Collects SIGINT, SIGTERM and SIGHUP, so that they raise no exception in the middle of anything."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequestedError(Exception):
    """A stop of the servers was requested; not a failure."""


@contextlib.contextmanager
def collected_stops() -> Iterator[list[int]]:
    """Give the stop requests that have come since the block began; nothing else happens on them.

    A closed terminal counts once: the kernel and the shell both tell of it, and a second request is one to hurry. An
    ignored SIGHUP (nohup) stays ignored.
    """
    came: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not came:
            came.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
