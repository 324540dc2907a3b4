"""The whole command around a server that does not come up: it can be interrupted, and says why a server died.

The server is a stand-in for vLLM, started as vLLM is. With a real one: tests/vllm/test_demo.py and test_failures.py.
"""

from __future__ import annotations

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
    assert finished.stderr == "interrupted\n"
    assert "Traceback" not in finished.stderr
    assert "error" not in finished.stderr
    assert finished.left_running == ()


def test_a_server_that_dies_while_starting_is_told_with_its_last_lines(serve: Any) -> None:
    finished = serve("die unproven")
    assert finished.code == ExitCode.SERVER_FAILED, finished
    assert "during start-up" in finished.first_line
    assert "cheese" in finished.first_line
    assert finished.stdout == ""
    assert "fake server, child" in finished.stderr
    assert len(finished.hints) == 1
    assert "server.log" in finished.hints[0]
    assert finished.left_running == ()


def test_a_value_that_vllm_refuses_is_bad_input_and_the_first_line_names_it(serve: Any) -> None:
    finished = serve("usage")
    assert finished.code == ExitCode.BAD_INPUT, finished
    assert "--dtype" in finished.first_line
    assert len(finished.hints) == 1
    assert "Traceback" not in finished.stderr
    assert finished.left_running == ()
