"""Waiting for what another thread or process does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_LONGEST_S = 120.0
"""A busy machine takes many times what an idle one does."""


def eventually(
    answer: Callable[[], T | None], what: str = "", *, within_s: float = _LONGEST_S, every_s: float = 0.02
) -> T:
    """Return `answer()` once it is true; what others do has no better moment.

    Args:
        what: the error when it never comes true.
        within_s: how long that is waited for.
        every_s: how often it is asked.
    """
    deadline = time.monotonic() + within_s
    while not (found := answer()):
        assert time.monotonic() < deadline, what or "never came true"
        time.sleep(every_s)
    return found


def is_running(pid: int) -> bool:
    """Whether a process computes still: one that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
