"""Decides whether vLLM computes the norms of queries and keys together with RoPE."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.graph_arguments import is_eager

_FLAG = "--compilation-config"
_KEY = "pass_config.enable_qk_norm_rope_fusion"
_RECORDS = (
    "benchmarks/records/2026-11-27_h100_norm_rope_fusion.json",
    "benchmarks/records/2026-11-27_h100_norm_rope_clients.json",
)
_HEAD_DIMS = (64, 128, 256)
"""Read from vLLM's pass: the widths for which its kernel is compiled."""


class NormRopeFusion(OptimizationPass):
    """One kernel of vLLM in place of the norms of queries and keys and RoPE, in every layer.

    vLLM finds the place in the compiled graph by itself. It leaves this off, since whether it pays depends on the GPU;
    so do we: beside our kernel for dense products no difference was shown. `tune` compares plans with it and without.
    """

    name = "norm_rope_fusion"
    flag = "norm-rope-fusion"
    title = "norms of queries and keys with RoPE in one kernel of vLLM"
    limits = (
        "the proof shows that vLLM's configuration has it; where its pattern is not in the model's graph, vLLM changes "
        "nothing and says so only in its debug log"
    )
    no_gain = "on one H100 no difference was shown with 1 and 16 clients beside skinny_gemm, 1.02x with one without it"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs CUDA, 16-bit arithmetic, norms by heads of a width that the kernel has, and vLLM's compiler."""
        attention = ctx.model.attention
        if ctx.device == "cpu":
            return "vLLM has the kernel on GPUs only"
        if not attention.has_head_norms:
            return "the model has no norms of query and key heads"
        if attention.head_dim not in _HEAD_DIMS:
            return f"needs heads of {', '.join(map(str, _HEAD_DIMS))} elements, found {attention.head_dim}"
        if ctx.dtype not in ("bfloat16", "float16"):
            return f"needs 16-bit arithmetic, found {ctx.dtype}"
        if is_eager(ctx) or ctx.pinned.is_on("--enforce-eager") or ctx.pinned.value("--optimization-level") == "0":
            return "without vLLM's compiler there is no graph to find it in"
        if _FLAG in ctx.pinned:
            return f"{_FLAG} is given after --: it can say {_KEY} too"
        return ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Return vLLM's flag where it is asked for; auto leaves it off."""
        wish, origin = ctx.wish(self.name)
        if wish is not Wish.ON:
            return self.when_off(
                ctx, f"{self.no_gain}; `moe-optimizer tune` measures it, --enable-{self.flag} switches it on"
            )
        on = ServeArguments(f"{_FLAG}.{_KEY}", "true")
        reason = f"asked for by {origin}: one launch a layer in place of several small ones"
        return self.decision(ctx, Status.ON, "on", reason, Applier.FLAGS, vllm_args=on, evidence=_RECORDS)
