"""Decides for how many tokens one launch of ours multiplies the gate and chooses the experts."""

from __future__ import annotations

import dataclasses

from moe_optimizer.plan.decision import Decision, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.fused_router import MAX_TOKENS, OP, fused_router_tokens

_RECORDS = (
    "benchmarks/records/2026-11-26_h100_one_client.json",
    "benchmarks/records/2026-11-26_h100_router_served.json",
)
"""Of servers on one GPU each."""


def with_fused_router(ctx: PlanContext, decision: Decision) -> Decision:
    """Return the decision about our expert kernels with the launch before them.

    On one GPU unless the profile has it off; on several only where the profile has it on.
    """
    params, setting = decision.params, ctx.profile.passes.flash_dmoe.fused_router
    if setting == "off" or not isinstance(params, FlashDmoeParams):
        return decision
    if decision.status is not Status.ON or params.kernel != "cuda":
        return decision
    if setting == "auto" and ctx.parallelism.num_devices > 1:
        # No such server was measured. A rank that finds the kernel wrong ends the start: all must choose alike.
        return decision
    if not fused_router_tokens(ctx):  # the rest is each layer's own
        if setting == "auto":
            return decision
        warning = f"flash_dmoe.fused_router ({ctx.profile_origin}): {OP} has no CUDA kernel in this build"
        return dataclasses.replace(decision, warnings=(*decision.warnings, warning))
    return dataclasses.replace(
        decision,
        reason=f"{decision.reason}; up to {MAX_TOKENS} tokens one launch multiplies the gate and chooses the experts",
        evidence=(*decision.evidence, *_RECORDS),
        params=dataclasses.replace(params, fused_router=MAX_TOKENS),
    )
