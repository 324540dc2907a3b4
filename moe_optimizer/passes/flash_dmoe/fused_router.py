"""Decides for how many tokens one launch of ours multiplies the gate and chooses the experts."""

from __future__ import annotations

import dataclasses

from moe_optimizer.plan.decision import Decision, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.fused_router import MAX_TOKENS, OP, hands_its_gate_over

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
    why_not = _why_not(ctx)
    if why_not and setting == "auto":
        return decision
    if why_not:
        warning = f"flash_dmoe.fused_router ({ctx.profile_origin}): {why_not}"
        return dataclasses.replace(decision, warnings=(*decision.warnings, warning))
    return dataclasses.replace(
        decision,
        reason=f"{decision.reason}; up to {MAX_TOKENS} tokens one launch multiplies the gate and chooses the experts",
        evidence=(*decision.evidence, *_RECORDS),
        params=dataclasses.replace(params, fused_router=MAX_TOKENS),
    )


def _why_not(ctx: PlanContext) -> str:
    """Return why no layer has that launch, or ""; the rest is each layer's own."""
    if OP not in ctx.software.kernels.cuda_ops:
        return f"{OP} has no CUDA kernel in this build"
    if not hands_its_gate_over(ctx.model):
        return f"vLLM's MoE layer does not hold the gate of {ctx.model.model_type} alone"
    return ""
