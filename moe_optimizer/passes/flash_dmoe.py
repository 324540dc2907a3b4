"""Our expert kernel in place of vLLM's."""

from __future__ import annotations

import dataclasses

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.passes.expert_kernel import DTYPES, OP, converted_format, why_model_does_not_fit, why_not_built
from moe_optimizer.plan.decision import Applier, Decision, Status

# From the records: Qwen3-30B-A3B, medians, our best variant over vLLM's at each number of tokens.
_ON_GPUS = (
    "the plugin does not offer the CUDA kernels to vLLM yet; on an H200 they win up to 8 tokens and lose at 16 to 128"
)
_GPU_RECORDS = (
    "benchmarks/records/2026-11-20_h200_direct_decode.json",
    "benchmarks/records/2026-11-20_h200_fused_experts.json",
)


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
        for check in (why_model_does_not_fit, _vllm_fits, why_not_built):
            reason = check(ctx)
            if reason:
                return False, reason
        return True, ""

    def is_required(self, ctx: PlanContext) -> bool:
        """Return whether it is asked for, or expert parallelism on the CPU cannot do without it."""
        return _needed_for_experts_apart(ctx) or super().is_required(ctx)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the decision to install the CPU kernel."""
        if ctx.device == "cuda":
            return dataclasses.replace(self.unavailable(ctx, _ON_GPUS), evidence=_GPU_RECORDS)
        reason = "replaces vLLM's expert kernel in every MoE layer"
        for need in _needed_for(ctx):
            reason += f"; needed for {need}"
        return self.decision(
            ctx,
            Status.ON,
            f"cpu kernel, {converted_format(ctx) or DTYPES[ctx.dtype]} weights",
            f"{reason}; no speed-up is claimed: no record compares the two on this machine",
            Applier.PLUGIN,
            evidence=(f"{OP} is built for cpu (csrc {ctx.software.kernels.source_hash[:12]})",),
            params={"kernel": "cpu", "unquantized": True, "fp8": False},
        )


def _needed_for(ctx: PlanContext) -> tuple[str, ...]:
    """Return what our kernel is on the CPU the only one for."""
    needs = ("EP, because vLLM's own CPU kernel ignores the expert map",) if _needed_for_experts_apart(ctx) else ()
    converted = converted_format(ctx)
    return (*needs, f"{converted} experts, which no other CPU kernel reads") if converted else needs


def _needed_for_experts_apart(ctx: PlanContext) -> bool:
    return ctx.device == "cpu" and ctx.expert_parallel


def _vllm_fits(ctx: PlanContext) -> str:
    if "--quantization" in ctx.pinned:
        return f"needs unquantised expert weights, found --quantization {ctx.pinned['--quantization']} after --"
    return ""
