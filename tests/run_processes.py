"""Looks for what a run has left behind."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the living processes that were started with this run's plan."""
    plan, found = str(run_dir.resolve() / "plan.json"), []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MOE_OPTIMIZER_PLAN") == plan:
                found.append(process)
        except psutil.Error:
            continue
    return found
