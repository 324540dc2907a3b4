"""A program that ends with its launcher, and what becomes of the processes that it forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_signal_of_a_forked_process_does_not_reach_the_event_loop_that_it_was_forked_from(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    folders = os.pathsep.join((str(tmp_path), str(Path(__file__).resolve().parents[2])))
    command = [sys.executable, "-m", "moe_optimizer.supervised", "program"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "nothing\n", done.stderr
