"""`tune` on the bundled model on this machine: it ends within its budget, and `bench` does not find its plan slower."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = str(ROOT / "examples" / "tiny-moe")
TRAFFIC = ("--workload", "small", "--clients", "4")
BUDGET_S = 30 * 60
STOP_S = 180
"""For the end of what the budget cut off: one stop of two servers."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


def run(*arguments: str) -> tuple[int, Any]:
    """Return exit code and JSON of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "moe_optimizer", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)


def test_its_plan_is_not_slower_than_stock_vllm(tmp_path: Path) -> None:
    begin = time.monotonic()
    code, ledger = run("tune", TINY_MOE, "--budget", f"{BUDGET_S}s", *TRAFFIC, "--run-dir", str(tmp_path / "tune"))
    assert time.monotonic() - begin <= BUDGET_S + STOP_S
    assert code == ExitCode.OK
    assert ledger["spent_s"] <= BUDGET_S + STOP_S
    assert any(each["step"] == "plan" for each in ledger["entries"]), ledger["entries"]
    code, found = run("bench", TINY_MOE, "--plan", ledger["plan_file"], *TRAFFIC, "--run-dir", str(tmp_path / "bench"))
    assert code == ExitCode.OK
    assert "slower" not in {each["verdict"] for each in found["verdicts"]}, found["verdicts"]


def test_limits_that_nothing_keeps_end_with_the_nearest_miss(tmp_path: Path) -> None:
    goal = ("--goal", "ttft<1ms", "--budget", "10m", *TRAFFIC)
    code, ledger = run("tune", TINY_MOE, *goal, "--run-dir", str(tmp_path), "--", "--enforce-eager")
    assert code == ExitCode.GOAL_MISSED
    assert ledger["nearest_miss"]["score"] > 1
