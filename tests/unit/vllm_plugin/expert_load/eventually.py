"""Waiting for what a thread of the plugin does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(answer: Callable[[], Any]) -> Any:
    """Return `answer()` once it is true; what a thread does has no better moment."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = answer()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("never came true")
