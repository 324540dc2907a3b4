"""Looks for what a run has left behind."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the living processes that were started with this run's plan, those of a group's servers included."""
    folder, found = f"{run_dir.resolve()}/", []
    for process in psutil.process_iter():
        try:
            plan = process.environ().get("MOE_OPTIMIZER_PLAN", "")
            if process.status() != psutil.STATUS_ZOMBIE and plan.startswith(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found
