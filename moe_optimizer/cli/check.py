"""Defines what the doctor reports, and tries what may end the process that tries it."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.child_process import python_command, python_environment
from moe_optimizer.vllm_plugin.drift import Seam

TIMEOUT_S = 300.0
"""Chosen: what is tried takes up to 10 s of processor time, and minutes on a machine that does much else."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the doctor looked at, and what it found."""

    name: str
    status: Literal["ok", "note", "missing"]
    """note: serving works, perhaps slower or without a feature; missing: serving does not work here."""
    detail: str
    hint: str | None = None
    """What to do about it; None when nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The output of `doctor --json`."""

    ok: bool
    """False if something that serving needs is missing, or with --drift if a seam has changed or gone."""
    checks: tuple[Check, ...]
    seams: tuple[Seam, ...] | None
    """None without --drift."""


def why_python_fails(*words: str) -> str:
    """Return why a process of this Python with these arguments fails, "" if it does not."""
    command = python_command(*words)
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=python_environment()
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S:.0f} s"
    if tried.returncode < 0:
        return f"signal {signal.Signals(-tried.returncode).name}"
    return (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1] if tried.returncode else ""
