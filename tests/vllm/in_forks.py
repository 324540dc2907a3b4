"""Calls a function in forks of this process, one after the other: nothing of one call is in another.

A fork is safe where no other thread can hold a lock, so there may be none: OPENBLAS_NUM_THREADS=1 keeps numpy from
starting any.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")


def in_forks(call: Callable[[Item], None], items: Iterable[Item]) -> int:
    """Call it with each item; stop at the first that fails and return that fork's exit code, else 0."""
    gc.freeze()  # vLLM collects garbage twice in a load: not among what was imported
    for item in items:
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert threads == 1, f"{threads} threads, expected one: a fork of this process may hang"
        pid = os.fork()
        if pid == 0:
            call(item)
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return status
    return 0
