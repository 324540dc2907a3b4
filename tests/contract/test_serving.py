"""The whole command with a real vLLM: it serves, it can be interrupted, it says why a server died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
BAD_INPUT, INTERRUPTED, SERVER_FAILED = 2, 130, 7

pytestmark = pytest.mark.vllm


def is_server(pid: int) -> bool:
    """Whether the process is the API server, past its first imports."""
    try:
        return b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_the_demo_serves_answers_and_stops(tmp_path: Path, run_command: Any) -> None:
    program = (str(ROOT / "scripts" / "demo.py"),)
    finished = run_command([], program=program, cwd=tmp_path, bounded=False, timeout_s=2000)
    assert finished.code == 0, finished
    assert "demo finished: served, answered, stopped" in finished.stdout
    row = next(line for line in finished.stderr.splitlines() if line.startswith("flash_dmoe"))
    assert "yes, 4 layers" in row
    assert finished.left_running == ()


def test_an_interrupt_while_the_server_starts_leaves_nothing(tmp_path: Path, run_command: Any) -> None:
    finished = run_command(
        ["--model", str(TINY_MOE), "--port", str(free_port()), "--run-dir", str(tmp_path / "run")],
        cwd=tmp_path, bounded=False, timeout_s=1000, interrupt_when=lambda pids: any(map(is_server, pids)),
    )  # fmt: skip
    assert finished.code == INTERRUPTED, finished
    assert finished.stdout == ""
    assert "Traceback" not in finished.stderr
    assert "error" not in finished.stderr
    assert finished.left_running == ()


def test_a_server_that_dies_while_starting_is_told_with_its_last_lines(tmp_path: Path, run_command: Any) -> None:
    arguments = ["--model", str(TINY_MOE), "--port", str(free_port()), "--run-dir", str(tmp_path / "run")]
    finished = run_command(
        [*arguments, "--", "--tokenizer", str(tmp_path / "none")], cwd=tmp_path, bounded=False, timeout_s=1000
    )
    assert finished.code == SERVER_FAILED, finished
    assert finished.first_line.startswith("error: server ended during start-up")
    assert finished.stdout == ""
    assert "last lines of server.log:" in finished.stderr
    assert len(finished.hints) == 1
    assert "server.log" in finished.hints[0]
    assert finished.left_running == ()


def test_a_value_that_vllm_refuses_is_bad_input_and_the_first_line_names_it(tmp_path: Path, run_command: Any) -> None:
    arguments = ["--model", str(TINY_MOE), "--port", str(free_port()), "--run-dir", str(tmp_path / "run")]
    finished = run_command([*arguments, "--", "--seed", "soon"], cwd=tmp_path, bounded=False, timeout_s=1000)
    assert finished.code == BAD_INPUT, finished
    assert finished.first_line == "error: vLLM refuses its arguments: argument --seed: invalid int value: 'soon'"
    assert len(finished.hints) == 1
    assert "Traceback" not in finished.stderr
    assert finished.left_running == ()
