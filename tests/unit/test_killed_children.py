"""What the first process of a server writes when one of its children is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_optimizer.killed_children import KILLED

PROGRAM = """
import multiprocessing, os, signal, sys, time
from moe_optimizer.killed_children import report_killed_children
report_killed_children()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
print(child.pid)
os.kill(child.pid, getattr(signal, sys.argv[1]))
child.join()
print(child.exitcode)
"""


@pytest.mark.parametrize(("name", "said"), [("SIGKILL", True), ("SIGSEGV", True), ("SIGTERM", False)])
def test_a_child_that_was_killed_is_named_once_and_one_that_was_asked_to_end_is_not(name: str, said: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, timeout=60, check=True)
    pid, status = done.stdout.split()
    assert int(status) < 0
    assert KILLED.findall(done.stderr) == ([(pid, name)] if said else [])
