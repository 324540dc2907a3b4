"""Ctrl-C ends the command with exit code 130 and without a word, whatever it was doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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

MOMENTS = (
    "typer/__pycache__/main",
    "pydantic/__pycache__/version",
    "moe_optimizer/cli/__pycache__/app",
    "moe_optimizer/cli/__pycache__/settings",
    "moe_optimizer/profiles/__pycache__/loader",
    "configs/balanced.yaml",
    "moe_optimizer/inspection/__pycache__/model_inspector",
    "tiny-moe/config.json",
    "moe_optimizer/inspection/__pycache__/hardware_probe",
    "/proc/cpuinfo",
    "moe_optimizer/passes/parallelism/__pycache__/parallelism",
    "moe_optimizer/plan/__pycache__/explain",
)


@pytest.mark.parametrize("moment", MOMENTS)
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
