"""8-bit floating point weights."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status


class Fp8(OptimizationPass):
    """FP8 weights: half the bytes of BF16 for the experts, which is what decoding waits for.

    An existing FP8 checkpoint is served as it is. Converting a BF16 checkpoint needs a quality gate, which this
    version does not have.
    """

    name = "fp8"
    flag = "fp8"
    title = "FP8 weights"
    limits = "GPUs need FP8 matrix units (compute capability 8.9 and up)"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Check the checkpoint's own quantisation, then the GPU."""
        model = ctx.model
        if _is_fp8(ctx):
            return True, ""
        if model.quant_method is not None:
            return False, f"the checkpoint is quantised already: {model.quant_method}, {model.weight_bits:g} bits"
        if ctx.device == "cuda" and not ctx.gpu.supports("fp8"):
            major, minor = ctx.gpu.compute_capability
            return False, f"needs FP8 matrix units (sm_89 or later), found sm_{major}{minor}"
        return True, ""

    def gain(self, ctx: PlanContext) -> Gain | None:
        """Return how much faster the expert weights of one decode step could be read."""
        if not ctx.model.is_moe or _is_fp8(ctx):
            return None
        from moe_optimizer.costs.roofline import experts_read_ratio

        ratio = experts_read_ratio(ctx.model, batch=ctx.workload.batch_size, from_bits=16, to_bits=8)
        return Gain(metric="expert weight bytes per decode step", ratio=ratio)

    def choose(self, ctx: PlanContext) -> Decision:
        """Keep an FP8 checkpoint as it is; say what is missing to make one."""
        if _is_fp8(ctx):
            reason = "the checkpoint is FP8 already and is served as it is, through vLLM's own kernels"
            return self.decision(ctx, Status.ON, "as in the checkpoint", reason, Applier.NONE)
        section = ctx.profile.passes.fp8
        if section.experts == "off" and section.linears == "off":
            return self.when_off(ctx, f"experts and linears are both off in {ctx.profile_origin}")
        return self.unavailable(ctx, "FP8 weights change the output, and the quality gate comes with a later one")


def _is_fp8(ctx: PlanContext) -> bool:
    return ctx.model.quant_method is not None and "fp8" in ctx.model.quant_method
