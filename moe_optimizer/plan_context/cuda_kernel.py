"""Why a CUDA kernel of ours cannot compute on the planned GPUs."""

from __future__ import annotations

from moe_optimizer.plan_context.context import PlanContext

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT=1"
_HOPPER = (9, 0)


def why_no_cuda_kernel(ctx: PlanContext, op: str) -> str:
    """Return why this build has no CUDA kernel of `op`, or ""."""
    kernels = ctx.software.kernels
    if not kernels.built:
        return f"kernel not built: {kernels.reason}"
    if op not in kernels.cuda_ops:
        why = f": {kernels.cuda_why_not}" if kernels.cuda_why_not else ""
        return f"{op} has no CUDA kernel in this build{why}"
    return ""


def why_not_bf16_on_hopper(ctx: PlanContext, op: str) -> str:
    """Return why `op`, whose kernel takes BF16 on Hopper, does not compute there, or ""."""
    if ctx.device == "cpu":
        return "the kernel runs on GPUs only"
    if reason := why_no_cuda_kernel(ctx, op):
        return reason
    if ctx.gpu.compute_capability != _HOPPER:
        major, minor = ctx.gpu.compute_capability
        return f"needs compute capability 9.0 (Hopper), found {major}.{minor}"
    return "" if ctx.dtype == "bfloat16" else f"needs bfloat16, found {ctx.dtype}"


def is_batch_invariant(ctx: PlanContext) -> bool:
    """Return whether vLLM is told to give a request the same bits whatever runs beside it."""
    return BATCH_INVARIANT in ctx.software.kernel_environment.split()
