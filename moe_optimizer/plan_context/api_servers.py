"""Says whether and how many API servers a plan starts: vLLM's processes that take requests in and send tokens out."""

from __future__ import annotations

from moe_optimizer.layouts.constants import MOST_API_SERVERS
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan_context.context import PlanContext

API_SERVERS_FLAG = "--api-server-count"
_ONE_ONLY = ("--enable-elastic-ep", "--enable-fault-tolerance")
"""Arguments with which vLLM has one API server."""


def may_add_api_servers(ctx: PlanContext) -> bool:
    """Return whether profile, arguments and vLLM's variables leave the number to the plan."""
    return (
        ctx.wish("scheduler")[0] is not Wish.OFF
        and ctx.profile.passes.scheduler.api_servers == "auto"
        and API_SERVERS_FLAG not in ctx.pinned
        and not any(flag in ctx.pinned for flag in _ONE_ONLY)
        and not ctx.software.one_api_server
    )


def most_api_servers(plan: Plan, *, one_by_variable: bool) -> int:
    """Return how many API servers a plan may give each server; 1 where vLLM starts one only.

    Args:
        plan: the server's.
        one_by_variable: whether a variable of the server's environment has vLLM start one.
    """
    one_only = one_by_variable or any(flag in plan.serve_args for flag in _ONE_ONLY)
    # The CPU build is started by its module for one API server: its `vllm` command does not run.
    return 1 if one_only or not plan.num_gpus else MOST_API_SERVERS


def added_api_servers(ctx: PlanContext) -> int:
    """Return how many each server gets where that is not what vLLM starts by itself; 0: its own number."""
    if ctx.layout_choice is None or not may_add_api_servers(ctx):
        return 0
    count = ctx.layout_choice.estimate.api_servers
    return count if count > ctx.layout_choice.layout.data_parallel_size else 0
