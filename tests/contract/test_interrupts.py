"""A stop ends the command at once, whatever it was doing: Ctrl-C without a word while nothing was said yet."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_optimizer.inspection.kernel_speeds import read_tables
from tests.eventually import eventually, is_running
from tests.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
INTERRUPTED = 130

pytestmark = pytest.mark.usefixtures("heeded_signals")

# Sends SIGINT to its own process at one exact moment: when a module or file whose name has `moment` in it is opened.
INTERRUPTER = """
import os, signal, sys

moment = {moment!r}

def hook(event, arguments):
    global moment
    if moment is None or event not in ("import", "open") or not isinstance(arguments[0], str):
        return
    if moment in arguments[0]:
        moment = None
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
"""

MOMENTS = ("typer/__pycache__/main", "moe_optimizer/cli/__pycache__/app", "configs/balanced.yaml", "/proc/cpuinfo")
MORE_MOMENTS = (
    "pydantic/__pycache__/version",
    "moe_optimizer/cli/__pycache__/settings",
    "moe_optimizer/profiles/__pycache__/loader",
    "moe_optimizer/inspection/__pycache__/model_inspector",
    "tiny-moe/config.json",
    "moe_optimizer/inspection/__pycache__/hardware_probe",
    "moe_optimizer/passes/parallelism/__pycache__/parallelism",
    "moe_optimizer/plan/__pycache__/explain",
)


@pytest.mark.parametrize(
    "moment", [*MOMENTS, *(pytest.param(moment, marks=pytest.mark.thorough) for moment in MORE_MOMENTS)]
)
def test_an_interrupt_while_planning_is_quiet(
    moment: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, run_command: Any
) -> None:
    # Elsewhere than the command's folder: Python keeps its bytecode beside it.
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(INTERRUPTER.format(moment=moment), encoding="utf-8")
    environ = {"PYTHONPATH": f"{hook}:{ROOT}"}
    finished = run_command(["--model", str(TINY_MOE), "--dry-run"], cwd=tmp_path, env=environ, fresh=True)
    assert finished.code == INTERRUPTED, finished
    assert (finished.stdout, finished.stderr) == ("", "")
    assert finished.left_running == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_while_kernels_are_measured_says_so_and_leaves_at_most_a_table_to_go_on_with(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ["--port", str(free_ports(4)), "--run-dir", str(tmp_path / "run"), "--calibrate", "60"]
    with subprocess.Popen(
        [sys.executable, "-m", "moe_optimizer", "serve", str(TINY_MOE), *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stderr is not None
        assert command.stdout is not None
        said = command.stderr.readline()
        assert "--calibrate" in said, said
        measuring = eventually(lambda: psutil.Process(command.pid).children(recursive=True))
        command.send_signal(number)
        assert command.stderr.read().splitlines()[-1] == "interrupted"
        assert command.stdout.read() == ""
    assert command.returncode == 128 + number
    assert not [each.pid for each in measuring if is_running(each.pid)]
    # What was measured by then is kept: the next start goes on with it.
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(table.unfinished for path in left for table in read_tables(path)), left
