"""vLLM's processes end with the launcher, also while they start. More: tests/unit/launcher/test_launched_run.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from tests.eventually import eventually
from tests.run_processes import processes_of
from tests.vllm.conftest import spawning, tiny_plan

LAUNCHER = """
import sys
from pathlib import Path
from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.plan import Plan
with running(Plan.load(Path(sys.argv[1])), run_dir=Path(sys.argv[2])):
    pass
"""


def engine_of(run_dir: Path) -> psutil.Process | None:
    """The engine, once it writes to the log: its title hides its environment, by which others are found."""
    log = run_dir / "server.log"
    found = re.search(r"\(EngineCore pid=(\d+)\)", log.read_text(errors="replace")) if log.exists() else None
    return psutil.Process(int(found[1])) if found else None


def test_a_launcher_that_is_killed_while_the_engine_starts_leaves_no_process(tmp_path: Path) -> None:
    plan, run_dir = tmp_path / "planned.json", tmp_path / "run"
    plan.write_text(tiny_plan("--enforce-eager").to_json())
    environment = {**os.environ, **spawning()}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(plan), str(run_dir)], env=environment)
    try:
        engine = eventually(lambda: engine_of(run_dir), "the engine did not start", within_s=400, every_s=0.1)
        launcher.kill()
        launcher.wait()
        # It takes at most 15 s where nothing else runs; here other servers start beside it.
        eventually(lambda: not engine.is_running() and not processes_of(run_dir), "it outlived its launcher")
    finally:
        launcher.kill()
        launcher.wait()
        for left in processes_of(run_dir):
            left.kill()
