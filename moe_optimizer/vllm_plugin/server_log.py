"""The server's log file: following it, and finding the reason of a failure in it."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

from moe_optimizer.errors import printable

_FOLLOW_INTERVAL_S = 0.2
_MAX_BYTES = 2**20
# "ValueError: ...", also behind vLLM's prefixes ("(Worker pid=1) ERROR 01-01 00:00:00 [file.py:1] ").
_ERROR = re.compile(r"(?:^|\] |\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$")
# What vLLM's outer processes raise when an inner one failed; the cause is elsewhere in the log.
_CONSEQUENCES = ("initialization failed", "root cause", "died unexpectedly")


def root_cause(log_path: Path) -> str:
    """Return the last exception in the log that is not the consequence of an earlier one; "" when there is none."""
    try:
        with log_path.open("rb") as stream:
            text = stream.read(_MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    found = [match[1] for line in text.splitlines() if (match := _ERROR.search(line))]
    causes = [line for line in found if not any(words in line for words in _CONSEQUENCES)]
    return printable(causes[-1] if causes else "")[:500]


class LogFollower:
    """Copies a growing file to a stream while the block lasts."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path = path
        self._stream = stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-follower", daemon=True)

    def __enter__(self) -> LogFollower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        with self._path.open(encoding="utf-8", errors="replace") as file:
            while True:
                stopping = self._stop.is_set()
                text = file.read()
                if text:
                    self._stream.write(text)
                    self._stream.flush()
                elif stopping:
                    return
                else:
                    self._stop.wait(_FOLLOW_INTERVAL_S)
