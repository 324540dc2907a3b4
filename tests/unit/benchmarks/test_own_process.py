"""What a process of a benchmark finds arrives as it is found; afterwards nothing of the process is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator

import pytest

from benchmarks.engine.own_process import each_of_own_process, in_own_process
from tests.eventually import is_running


def _process_id(added: int) -> int:
    return os.getpid() + added


def _found_and_hangs() -> Generator[int]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child.pid
    time.sleep(600)


def _found_and_dies() -> Generator[str]:
    yield "first"
    os._exit(3)


def test_a_functions_result_comes_from_another_process() -> None:
    assert in_own_process(_process_id, 0) != os.getpid()


def test_a_process_that_is_not_at_its_end_in_time_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="_found_and_hangs"):
        list(each_of_own_process(_found_and_hangs, limit_s=0))


def test_a_process_that_dies_is_an_error_after_what_it_found() -> None:
    results = each_of_own_process(_found_and_dies)
    assert next(results) == "first"
    with pytest.raises(RuntimeError, match="without a result"):
        next(results)


def test_who_stops_reading_ends_the_process() -> None:
    results = each_of_own_process(_found_and_hangs)
    child = next(results)
    results.close()
    assert not is_running(child)
