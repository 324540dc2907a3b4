"""Decides for how many tokens one launch of ours multiplies the gate and chooses the experts."""

from __future__ import annotations

import dataclasses

from moe_optimizer.plan.decision import Decision, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_balancing import load_balancer_runs

OP = "gate_topk"
MAX_TOKENS = 8
"""Of the kernel (csrc/include/moeopt/gate_topk.cuh)."""
MEASURED = {("NVIDIA H100 80GB HBM3", 128, 2048): "benchmarks/records/2026-11-26_h100_gate_topk.json"}
"""GPU as the driver names it, experts and width of the gate -> the record in which the launch, with our experts behind
it, takes less than vLLM's gate and top-k at every number of tokens up to MAX_TOKENS."""


def with_fused_router(ctx: PlanContext, decision: Decision) -> Decision:
    """Return the decision about our expert kernels with the launch before them, where the profile asks for it or leaves
    it to what was measured.
    """
    params, setting = decision.params, ctx.profile.passes.flash_dmoe.fused_router
    if setting == "off" or not isinstance(params, FlashDmoeParams):
        return decision
    if decision.status is not Status.ON or params.kernel != "cuda":
        return decision
    record = MEASURED.get((ctx.gpu.name, ctx.model.num_experts, ctx.model.hidden_size))
    built = OP in ctx.software.kernels.cuda_ops  # the rest is each layer's own
    if setting == "on":
        if not built:
            warning = f"flash_dmoe.fused_router ({ctx.profile_origin}): {OP} has no CUDA kernel in this build"
            return dataclasses.replace(decision, warnings=(*decision.warnings, warning))
    # vLLM exchanges logits, or counts experts, between gate and top-k.
    elif record is None or not built or ctx.parallelism.data_parallel_size > 1 or load_balancer_runs(ctx):
        return decision
    why = f"measured to be faster on {ctx.gpu.name}"
    if record is None:
        why = f"as {ctx.profile_origin} asks: with such a gate it is not measured beside vLLM's on this GPU"
    return dataclasses.replace(
        decision,
        reason=f"{decision.reason}; up to {MAX_TOKENS} tokens one launch multiplies the gate and chooses the experts, "
        f"{why}",
        evidence=decision.evidence if record is None else (*decision.evidence, record),
        params=dataclasses.replace(params, fused_router=MAX_TOKENS),
    )
