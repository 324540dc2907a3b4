"""Ends a block on SIGTERM or SIGHUP as on Ctrl-C: processes are stopped and temporary files removed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def clean_termination() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit inside the block; by default they end Python at once.

    An ignored signal (nohup) stays ignored. Call this in the main thread.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    # The exit code that shells report for an end by this signal.
    raise SystemExit(128 + number)
