"""Our expert kernel in place of vLLM's."""

from __future__ import annotations

import dataclasses

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Applier, Decision, Status

_OP = "fused_experts"
# From the records: Qwen3-30B-A3B, medians, our best variant over vLLM's at each number of tokens.
_ON_GPUS = (
    "the plugin does not offer the CUDA kernels to vLLM yet; on an H200 they win up to 8 tokens and lose at 16 to 128"
)
_GPU_RECORDS = (
    "benchmarks/records/2026-11-20_h200_direct_decode.json",
    "benchmarks/records/2026-11-20_h200_fused_experts.json",
)
_ACTIVATIONS = ("silu", "swiglu")
_MAX_EXPERTS = 1024
_MAX_TOP_K = 32
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class FlashDmoe(OptimizationPass):
    """The routed experts' two matrix products, activation and combine in one kernel of ours.

    Applied by the plugin: its experts class goes before vLLM's in the kernel choice of each MoE layer, and a
    layer it does not support falls through to vLLM's own.
    """

    name = "flash_dmoe"
    flag = "flash-dmoe"
    title = "our expert kernel instead of vLLM's"
    limits = "vLLM's CPU build; gated SiLU experts without biases, unquantised weights, at most 1024 experts and top-32"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Check the model's experts, then vLLM, then which kernels are built."""
        for check in (_model_fits, _vllm_fits, _kernel_built):
            reason = check(ctx)
            if reason:
                return False, reason
        return True, ""

    def is_required(self, ctx: PlanContext) -> bool:
        """Return whether it is asked for, or expert parallelism on the CPU cannot do without it."""
        return _needed(ctx) or super().is_required(ctx)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the decision to install the CPU kernel."""
        if ctx.device == "cuda":
            return dataclasses.replace(self.unavailable(ctx, _ON_GPUS), evidence=_GPU_RECORDS)
        reason = "replaces vLLM's expert kernel in every MoE layer"
        if _needed(ctx):
            reason += "; needed for EP, because vLLM's own CPU kernel ignores the expert map"
        return self.decision(
            ctx,
            Status.ON,
            f"cpu kernel, {_DTYPES[ctx.dtype]} weights",
            f"{reason}; no speed-up is claimed: no record compares the two on this machine",
            Applier.PLUGIN,
            evidence=(f"{_OP} is built for cpu (csrc {ctx.software.kernels.source_hash[:12]})",),
            params={"kernel": "cpu", "unquantized": True, "fp8": False},
        )


def _needed(ctx: PlanContext) -> bool:
    return ctx.device == "cpu" and ctx.expert_parallel


def _model_fits(ctx: PlanContext) -> str:
    model = ctx.model
    if not model.is_moe:
        return "the model has no experts"
    if model.quant_method is not None:
        return f"needs unquantised expert weights, found {model.quant_method}"
    if model.expert_matrices != 3:
        return f"needs gated experts (3 matrices), found {model.expert_matrices}"
    if model.expert_activation not in _ACTIVATIONS:
        return f"needs the activation silu, found {model.expert_activation or 'none named'}"
    if model.expert_has_bias:
        return "needs experts without biases"
    if model.num_experts > _MAX_EXPERTS or model.top_k > _MAX_TOP_K:
        return (
            f"needs at most {_MAX_EXPERTS} experts and top-{_MAX_TOP_K}, found {model.num_experts}, top-{model.top_k}"
        )
    if ctx.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, found {ctx.dtype}"
    return ""


def _vllm_fits(ctx: PlanContext) -> str:
    if "--quantization" in ctx.pinned:
        return f"needs unquantised expert weights, found --quantization {ctx.pinned['--quantization']} after --"
    return ""


def _kernel_built(ctx: PlanContext) -> str:
    kernels = ctx.software.kernels
    if not kernels.built:
        return f"kernel not built: {kernels.reason}"
    if ctx.device == "cpu":
        return "" if _OP in kernels.cpu_ops else f"{_OP} has no CPU kernel in this build"
    if _OP not in kernels.cuda_ops:
        return f"{_OP} has no CUDA kernel in this build"
    major, minor = ctx.gpu.compute_capability
    wanted = {f"sm_{major}{minor}", f"sm_{major}{minor}a"}
    if not wanted & set(kernels.cuda_archs):
        return f"kernel not built for sm_{major}{minor}, only for {', '.join(kernels.cuda_archs) or 'no GPU'}"
    return ""
