"""The lines of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and what was found."""

    name: str
    status: Literal["ok", "note", "missing"]
    """note: serving works without it, less well; missing: serving here does not work."""
    detail: str
    hint: str | None = None
    """What to do about it; None when nothing is wrong."""


@dataclass(frozen=True, slots=True)
class SeamState:
    """One place in vLLM that this package builds on, as found in the installed one."""

    name: str
    status: Literal["present", "changed", "gone"]
    detail: str
    why: str
    """What this package needs it for."""
    remove_when: str
    """When this package stops needing it."""
