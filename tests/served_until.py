"""Serves a plan as the command `serve` does, and hands the ready servers to a visitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_optimizer.launcher import launch
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.plan.plan import Plan


def serve(plan: Plan, *, on_ready: Callable[[ServerInfo], None] = lambda info: None, **options: Any) -> None:
    """Serve `plan` until something fails or a signal comes: both are raised."""
    launch.serve(plan, on_ready=on_ready, **options)
