"""Ending on SIGTERM or SIGHUP like on Ctrl-C: with what was started stopped, and temporary files removed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def clean_termination() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit while the block lasts; by default they end Python where it stands.

    A signal that is ignored (nohup) stays so. For the main thread.
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
    # As shells report the end by a signal.
    raise SystemExit(128 + number)
