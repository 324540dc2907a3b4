"""A program that ends with its launcher, and what becomes of the processes that it forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moe_optimizer.supervised import MIDDLEWARE

PROGRAM = """\
import os, signal, socket
heard, wakeup = socket.socketpair()
heard.setblocking(False)
wakeup.setblocking(False)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.set_wakeup_fd(wakeup.fileno())
forked = os.fork()
if not forked:
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(0)
os.waitpid(forked, 0)
try:
    print(heard.recv(1))
except BlockingIOError:
    print("nothing")
"""


COLLECTS = """\
import gc, os
print(gc.isenabled(), flush=True)
if not os.fork():
    print(gc.isenabled(), gc.get_freeze_count() > 0, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_signal_of_a_forked_process_does_not_reach_the_event_loop_that_it_was_forked_from(tmp_path: Path) -> None:
    assert output_of(PROGRAM, tmp_path) == ["nothing"]


def test_an_api_server_collects_no_garbage_while_it_starts_and_its_forks_do(tmp_path: Path) -> None:
    assert output_of(COLLECTS, tmp_path, "--middleware", MIDDLEWARE) == ["False", "True True"]


def test_another_program_collects_garbage_all_the_time(tmp_path: Path) -> None:
    assert output_of(COLLECTS, tmp_path, "--middleware", "other") == ["True", "True False"]


def output_of(program: str, folder: Path, *arguments: str) -> list[str]:
    """Return the lines of a supervised program."""
    (folder / "program.py").write_text(program)
    folders = os.pathsep.join((str(folder), str(Path(__file__).resolve().parents[2])))
    command = [sys.executable, "-m", "moe_optimizer.supervised", "program", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()
