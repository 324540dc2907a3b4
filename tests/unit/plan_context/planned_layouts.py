"""Plans of a model on H100s, and what they say of their layouts."""

from __future__ import annotations

from moe_optimizer.plan.layout_choice import LayoutChoice
from moe_optimizer.plan.plan import Plan
from tests.builders import gpus, made_plan, qwen3_30b_a3b


def choice_of(plan: Plan) -> LayoutChoice:
    assert plan.layouts is not None
    return plan.layouts


def servers_of(plan: Plan) -> int:
    return 1 if plan.group is None else len(plan.group.servers)


def planned(count=8, **changes) -> Plan:
    return made_plan(qwen3_30b_a3b(), gpus("h100_sxm", count), **changes)
