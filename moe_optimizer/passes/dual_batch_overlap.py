"""Decides whether two half batches overlap communication with computation."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import DualBatchOverlapParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext

_BACKENDS = ("deepep_low_latency", "deepep_high_throughput")
_FLAG = "--all2all-backend"


class DualBatchOverlap(OptimizationPass):
    """While one half of the batch is computed, the other half's tokens travel to their experts.

    vLLM has it for data parallel with expert parallel, where tokens really travel, and with an all-to-all that can run
    beside the computation: DeepEP's. It is switched on only where it is asked for: what it brings depends on the
    network between the GPUs, and it was not run with this version.
    """

    name = "dual_batch_overlap"
    flag = "dual-batch-overlap"
    title = "overlap expert exchange with computation"
    limits = (
        "pays only where the exchange takes long beside the computation; can fail at start-up for some "
        "models, so it must be tried on the very model and machine before it is relied on"
    )
    no_gain = "it has not run with this version: how much of the exchange it hides is not known"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Needs experts, CUDA, DP together with EP, and DeepEP."""
        if ctx.device == "cpu":
            return "vLLM overlaps batches on CUDA only"
        if ctx.num_gpus < 2:
            return "needs at least 2 GPUs, found 1"
        if ctx.parallelism.data_parallel_size < 2 or not ctx.parallelism.expert_parallel:
            return (
                "needs data parallel with expert parallel (--enable-expert-parallel, and --data-parallel-size after "
                "--); without them no tokens travel to other GPUs"
            )
        given = ctx.pinned.value(_FLAG)
        if given not in (None, *_BACKENDS):
            return f"needs a DeepEP all-to-all, and {_FLAG} {given} is given after --"
        if ctx.hardware.origin == "probed" and not ctx.software.deep_ep:
            return "needs DeepEP (the package deep_ep), which is not installed here"
        return ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the decision for a pass that is not used, which leaves the user's own flag where it is."""
        if ctx.pinned.is_on("--enable-dbo"):
            reason = f"{reason}; --enable-dbo is given after --, and vLLM decides what comes of it"
        return super().when_off(ctx, reason)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the flags where it is asked for; auto leaves it off."""
        wish, origin = ctx.wish(self.name)
        if wish is not Wish.ON:
            return self.when_off(
                ctx, "no measurement of this version shows a gain; --enable-dual-batch-overlap tries it"
            )
        backend = ctx.pinned.value(_FLAG) or ctx.section(self.name).all2all_backend
        warnings = ("dual_batch_overlap: not run with this version; compare with --disable-dual-batch-overlap",)
        if not ctx.software.deep_ep:
            warnings += (f"dual_batch_overlap: DeepEP (the package deep_ep) must be installed on {ctx.gpu.key}",)
        return self.decision(
            ctx,
            Status.ON,
            f"on, {backend}",
            f"asked for by {origin}: half of a batch is computed while the other half's tokens travel",
            Applier.FLAGS,
            vllm_args=ServeArguments("--enable-dbo", _FLAG, backend),
            params=DualBatchOverlapParams(all2all_backend=backend),
            warnings=warnings,
        )
