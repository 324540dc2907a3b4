"""Defines what the doctor reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_optimizer.vllm_plugin.drift import Seam


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
