"""Counts SIGINT and SIGTERM, so that they raise no exception in the middle of anything."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequestedError(Exception):
    """A stop of the servers was requested; not a failure."""


class StopSignals:
    """Counts SIGINT and SIGTERM for as long as the block lasts."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
