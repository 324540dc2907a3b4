"""Holds which versions of vLLM this package has been run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRun:
    """One version of vLLM, seen running on one kind of machine."""

    version: str
    """Without the build that follows "+"."""
    device: Literal["cpu", "cuda"]
    machine: str
    ran: str
    date: str
    """Year, month and day of the last run."""
    evidence: str
    """File of this repository that holds what was seen, or that ran it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRuns:
    """All of them."""

    runs: tuple[VllmRun, ...] = ()

    def versions(self, device: str) -> tuple[str, ...]:
        """Return the versions run on a kind of device, the newest first."""
        found = {run.version for run in self.runs if run.device == device}
        return tuple(sorted(found, key=version_numbers, reverse=True))

    def why_untried(self, version: str, device: str) -> str:
        """Say that a vLLM has not been run; "" if it has, or if there is no table."""
        release, known = version.partition("+")[0], self.versions(device)
        if not self.runs or release in known:
            return ""
        build = {"cpu": "CPU", "cuda": "CUDA"}.get(device, "unknown")
        return (
            f"moe-optimizer has not been run with vLLM {release or 'of unknown version'} ({build} build), "
            f"only with {', '.join(known) or 'other builds'}"
        )


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare it with others."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
