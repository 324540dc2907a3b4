"""Defines what the doctor reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_optimizer.vllm_plugin.drift import Seam


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and what was found."""

    name: str
    status: Literal["ok", "note", "missing"]
    """note: serving works without it, less well; missing: serving here does not work."""
    detail: str
    hint: str | None = None
    """What to do about it; None when nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `doctor --json` prints."""

    ok: bool
    """Whether nothing that serving here needs is missing, and with --drift no seam has changed or gone."""
    checks: tuple[Check, ...]
    seams: tuple[Seam, ...] | None
    """None without --drift."""
