"""A whole `tune` between real servers: ablation, settings, confirmation, result and judgement, within its budget."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.plan import Plan
from tests.free_ports import free_port
from tests.vllm import slow_stock
from tests.vllm.conftest import FORKED, TINY_MOE

BUDGET_S = 30 * 60

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * BUDGET_S)]


@pytest.fixture
def _slow_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(slow_stock.__file__, site)
    forked = (FORKED / "sitecustomize.py").read_text()  # Python reads one file of this name
    (site / "sitecustomize.py").write_text(f"{forked}\nimport slow_stock\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_slow_stock")
def test_a_plan_that_wins_is_tuned_judged_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run: Path = tmp_path / "run"
    traffic = ("--workload", "small", "--clients", "4", "--requests-per-client", "1")
    code = main([
        "tune", str(TINY_MOE), "--enable-flash-dmoe", "--calibrate", "0", "--budget", f"{BUDGET_S}s", *traffic,
        "--port", str(free_port()), "--run-dir", str(run), "--json",
        "--", "--enforce-eager", "--max-model-len", "512", "--enable-chunked-prefill", "--max-num-seqs", "16",
    ])  # fmt: skip
    ledger: Any = json.loads(capsys.readouterr().out)
    shown = json.dumps(ledger["entries"], indent=1)
    assert code == ExitCode.OK, shown
    assert ledger["spent_s"] <= BUDGET_S, shown
    by_step: dict[str, list[Any]] = {}
    for each in ledger["entries"]:
        by_step.setdefault(each["step"], []).append(each)
    assert by_step["plan"][0]["verdict"] == "faster", shown
    ablated = {each["what"]: each for each in by_step["ablation"]}
    assert ablated["flash_dmoe"]["verdict"] == "faster", shown
    assert all(each["verdict"] for each in ablated.values()), shown
    assert any(each["score"] for each in by_step["setting"]), shown
    assert by_step["quality"][-1]["kept"], shown
    assert ledger["ended"] == "done", shown
    plan = Plan.load(run / "plan.json")
    assert plan.decision("flash_dmoe").status is Status.ON
    assert plan.digest == ledger["plan_digest"]
