"""Decides whether our kernel multiplies few tokens with the weights of dense layers."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cuda_kernel import BATCH_INVARIANT, is_batch_invariant, why_not_bf16_on_hopper

OP = "skinny_gemm"
MAX_TOKENS = 8
"""Of the kernel (csrc/include/moeopt/skinny_gemm.cuh)."""
_DENSE_IN_BF16 = (None, "mxfp4")
"""Methods of checkpoints whose dense weights are not quantised."""
_RECORDS = (
    "benchmarks/records/2026-11-27_h100_dense_products.json",
    "benchmarks/records/2026-11-27_h100_one_client.json",
)
_RECORDS_OF_FP8 = (
    "benchmarks/records/2026-11-27_h100_dense_products.json",
    "benchmarks/records/2026-11-27_h100_dense_products_blocks.json",
    "benchmarks/records/2026-11-28_h200_fp8_few_clients.json",
    "benchmarks/records/2026-11-28_h100_fp8_few_clients.json",
)
_FP8_SERVED = "with FP8 weights a server with one client was 1.03x as fast with it, one with 16 clients 0.99x"
_OFFLOADING = ("--cpu-offload-gb", "--offload-backend", "--offload-group-size")


class SkinnyGemm(OptimizationPass):
    """Products of few tokens with dense weights (attention's projections, dense MLPs) by our kernel, in BF16 or FP8.

    The worker times both at load, on the model's own weights, and takes ours for a shape and up to as many tokens as it
    was faster for. Shapes differ by model and by tensor parallelism, and a table would have to know them all.
    """

    name = "skinny_gemm"
    flag = "skinny-gemm"
    title = "products of few tokens with dense weights by our kernel"
    limits = (
        f"Hopper, BF16 weights, and FP8 ones where it is asked for; up to {MAX_TOKENS} tokens of a step, where each "
        "worker measures it faster while it loads; sums in another order than cuBLAS's"
    )
    no_gain = "what a server gains was measured with layers of Qwen3-30B-A3B only"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs the kernel, a GPU that it is built for, and BF16 tokens that nothing else multiplies."""
        if reason := why_not_bf16_on_hopper(ctx, OP):
            return reason
        if ctx.pinned.is_on("--enable-lora"):
            return "--enable-lora: vLLM adds adapters to the products of its own linear layers"
        if given := [flag for flag in _OFFLOADING if flag in ctx.pinned]:
            return f"{', '.join(given)}: the kernel reads weights early, when the launch that brings them may still run"
        if is_batch_invariant(ctx):
            return f"{BATCH_INVARIANT}: every number of tokens has to take the same kernel"
        return ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Use it where it is asked for, and by itself on one GPU in BF16: no other server was measured."""
        wish, origin = ctx.wish(self.name)
        fp8 = _dense_weights_are_fp8(ctx)
        if wish is not Wish.ON:
            if ctx.parallelism.num_devices > 1:
                return self.when_off(ctx, f"not measured on several GPUs; --enable-{self.flag} switches it on")
            if fp8:
                return self.when_off(ctx, f"{_FP8_SERVED}; --enable-{self.flag} switches it on")
            if ctx.model.quant_method not in _DENSE_IN_BF16:
                return self.when_off(ctx, f"the checkpoint is quantised ({ctx.model.quant_method})")
        gained = "on one H100 a server with one client was 1.06x as fast with it"
        why = f"asked for by {origin}" if wish is Wish.ON else gained
        other = f"vLLM's product; {_FP8_SERVED}" if fp8 else "cuBLAS"
        return self.decision(
            ctx,
            Status.ON,
            f"up to {MAX_TOKENS} tokens",
            f"{why}; each worker checks and times it at load, and keeps it where it is faster than {other}",
            Applier.PLUGIN,
            evidence=_RECORDS_OF_FP8 if fp8 else _RECORDS,
        )


def _dense_weights_are_fp8(ctx: PlanContext) -> bool:
    """Return whether weights beside the experts are, or may be, in FP8: of the checkpoint, by the plan, by argument."""
    if ctx.model.quant_method is not None:
        return ctx.model.weights_are_fp8
    fp8 = ctx.params(Fp8Params)
    pinned = ctx.pinned.value("--quantization") or ""
    return "fp8" in pinned or pinned == "online" or (fp8 is not None and fp8.linear_bits is not None)
