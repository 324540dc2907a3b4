"""Results that are made once for all test workers: the first that asks makes it, the others wait and read it."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

Result = TypeVar("Result")


def folder_of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this test run: with pytest-xdist the parent of every worker's own."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def made_once(folder: Path, name: str, make: Callable[[], Result]) -> Result:
    """Return what `make` returned in the first of this run's workers that asked for `name`.

    If it raises there, the next worker that asks tries again. `make` asks for no other shared result: a worker that
    holds one lock never waits for another.
    """
    stored = folder / f"{name}.pickle"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stored.is_file():
            return pickle.loads(stored.read_bytes())
        result = make()
        written = stored.with_suffix(".part")
        written.write_bytes(pickle.dumps(result))
        written.rename(stored)
        return result
