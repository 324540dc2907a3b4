"""Tells from its name which of vLLM's processes this is."""

from __future__ import annotations

import multiprocessing
import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """What a process does in the server."""

    role: str
    """"frontend" (API server or the user's own script), "engine", "worker" or "helper" (a short-lived one)."""
    rank: int
    """Its number among the processes of its role; 0 where its name has none."""


_HELPER_MODULES = ("vllm.model_executor.models.registry",)
"""Modules that vLLM runs as one-shot subprocesses that load plugins too."""


def process_role() -> ProcessRole:
    """Return the role by the name that vLLM gave this process ("EngineCore", "EngineCore_DP1", "VllmWorker-0")."""
    return role_of(multiprocessing.current_process().name, _main_module())


def role_of(process_name: str, main_module: str) -> ProcessRole:
    """Return the role of a process by its name and its main module."""
    if main_module in _HELPER_MODULES:
        return ProcessRole("helper", 0)
    match = re.search(r"(EngineCore|Worker|ApiServer)\D*(\d+)?", process_name, re.IGNORECASE)
    if match is None:
        return ProcessRole("frontend", 0)
    role = {"enginecore": "engine", "worker": "worker", "apiserver": "frontend"}[match[1].lower()]
    return ProcessRole(role, int(match[2] or 0))


def _main_module() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else ""
