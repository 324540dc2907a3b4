"""Says for how many tokens one launch of ours multiplies the gate and chooses the experts."""

from __future__ import annotations

from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.model import ModelSpec

OP = "gate_topk"
MAX_TOKENS = 8
"""Of the kernel (csrc/include/moeopt/gate_topk.cuh)."""
_HANDED_OVER = ("qwen3_moe",)
"""Model types whose gate vLLM 0.26 hands to its MoE layer, and multiplies with nothing else there. Others with experts
that our kernels compute multiply it themselves, as Mixtral and gpt-oss do, or with a shared expert's gate.
"""


def hands_its_gate_over(model: ModelSpec) -> bool:
    """Return whether vLLM's MoE layer has the gate of this model, which it multiplies with nothing else."""
    return model.model_type in _HANDED_OVER


def fused_router_tokens(ctx: PlanContext) -> int:
    """Return up to how many tokens a step of a server on one GPU has that launch, where our expert kernels compute; 0:
    none has, by the profile, the model or what is built.
    """
    off = ctx.profile.passes.flash_dmoe.fused_router == "off"
    has = hands_its_gate_over(ctx.model) and OP in ctx.software.kernels.cuda_ops
    return MAX_TOKENS if has and not off else 0
