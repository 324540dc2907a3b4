"""The whole command around a server that does not come up: it can be interrupted, and says why a server died.

The server is a stand-in for vLLM, started as vLLM is. With a real one: tests/vllm/test_demo.py and test_failures.py.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import ExitCode
from tests.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
FAKE = ROOT / "tests" / "unit" / "launcher" / "fake_server.py"
INTERRUPTED = 130

pytestmark = pytest.mark.usefixtures("heeded_signals")

# `moe-optimizer serve`, whose server is the stand-in with the behaviour that the first argument names.
WITH_STAND_IN = f"""
import sys
from moe_optimizer.cli.main import main
from moe_optimizer.launcher import deployment

behaviour = sys.argv[1].split()
deployment.server_command = lambda plan, arguments: [
    sys.executable, {str(FAKE)!r}, arguments.value("--port"), *behaviour
]
sys.exit(main(sys.argv[2:], program="run_optimizer.py", command="serve"))
"""


@pytest.fixture
def serve(tmp_path: Path, run_command: Any) -> Any:
    """Serves through a stand-in with some behaviours; returns the command, ended."""

    def run(behaviour: str, **more: Any) -> Any:
        arguments = ["--model", str(TINY_MOE), "--port", str(free_port()), "--run-dir", str(tmp_path / "run")]
        program = ("-c", WITH_STAND_IN)
        return run_command([behaviour, *arguments], program=program, cwd=tmp_path, bounded=False, **more)

    return run


def is_server(pid: int) -> bool:
    """Whether the process is the server and not the command, whose code names it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [bytes(FAKE)]
    except OSError:
        return False


def test_an_interrupt_while_the_server_starts_leaves_nothing(serve: Any) -> None:
    finished = serve("silent escape unproven", interrupt_when=lambda pids: any(map(is_server, pids)))
    assert finished.code == INTERRUPTED, finished
    assert finished.stdout == ""
    assert finished.stderr.startswith("starting vLLM; its log: ")
    assert finished.stderr.endswith("\ninterrupted\n")
    assert "Traceback" not in finished.stderr
    assert "error: " not in finished.stderr
    assert finished.left_running == ()


def test_a_server_that_dies_while_starting_is_told_with_its_last_lines(serve: Any) -> None:
    finished = serve("die unproven")
    assert finished.code == ExitCode.SERVER_FAILED, finished
    (error,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert "during start-up" in error
    assert "cheese" in error
    assert finished.stderr.index("importing vLLM") < finished.stderr.index(error)
    assert finished.stdout == ""
    assert "fake server, child" in finished.stderr
    assert len(finished.hints) == 1
    assert "server.log" in finished.hints[0]
    assert finished.left_running == ()


def test_a_value_that_vllm_refuses_is_bad_input_and_the_error_names_it(serve: Any) -> None:
    finished = serve("usage")
    assert finished.code == ExitCode.BAD_INPUT, finished
    (error,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert "--dtype" in error
    assert len(finished.hints) == 1
    assert "Traceback" not in finished.stderr
    assert finished.left_running == ()


def test_on_a_terminal_a_start_is_one_line_that_is_written_over(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["--model", str(TINY_MOE), "--port", str(free_port()), "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", WITH_STAND_IN, "silent unproven", *arguments, "--calibrate", "0"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, cwd=tmp_path)
    os.close(theirs)
    shown = b""
    try:
        while shown.count(b"importing vLLM") < 3:
            shown += os.read(ours, 4096)
    finally:
        started.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    assert started.wait(60) == INTERRUPTED
    _, *states = re.split(rb"\r\x1b\[K|\r\n", shown)
    live = [state for state in states if b"importing vLLM" in state]
    assert len(live) >= 3
    assert all(re.match(rb"\d+ s(?: of about \d+ s)?: importing vLLM \d+ s", state) for state in live)
    assert states[-2:] == [b"interrupted", b""]
