"""The stand-in for vLLM (fake_server.py), started as the launcher starts vLLM, and what makes a plan that has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moe_optimizer.plan.plan import Plan

ROOT = Path(__file__).parents[3]
FAKE = ("-m", "moe_optimizer.supervised", "tests.unit.launcher.fake_server")

Fake = Callable[..., Plan]
