"""One line of the doctor's report."""

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
