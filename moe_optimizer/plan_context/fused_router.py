"""Says for how many tokens one launch of ours multiplies the gate and chooses the experts."""

from __future__ import annotations

from moe_optimizer.plan_context.context import PlanContext

OP = "gate_topk"
MAX_TOKENS = 8
"""Of the kernel (csrc/include/moeopt/gate_topk.cuh)."""


def fused_router_tokens(ctx: PlanContext) -> int:
    """Return up to how many tokens a step of a server on one GPU has that launch, where our expert kernels compute; 0:
    none has, by the profile or by what is built.
    """
    off = ctx.profile.passes.flash_dmoe.fused_router == "off"
    return 0 if off or OP not in ctx.software.kernels.cuda_ops else MAX_TOKENS
