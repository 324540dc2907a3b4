"""Makes one Plan from a model, a machine and a profile."""

from __future__ import annotations

from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.planner.planner import make_plan

__all__ = ["PlanRequest", "make_plan"]
