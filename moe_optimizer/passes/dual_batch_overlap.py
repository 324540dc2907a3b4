"""Two half batches that overlap communication with computation."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Decision


class DualBatchOverlap(OptimizationPass):
    """While one half of the batch is computed, the other half's tokens travel to their experts.

    Needs data parallel plus expert parallel with a DeepEP all-to-all, as vLLM has it.
    """

    name = "dual_batch_overlap"
    flag = "dual-batch-overlap"
    title = "overlap expert exchange with computation"
    limits = (
        "pays only where the exchange takes long beside the computation; can fail at start-up for some "
        "models, so it must be tried on the very model and machine before it is switched on"
    )

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Needs experts, CUDA, and DP together with EP."""
        if not ctx.model.is_moe:
            return False, "the model has no experts"
        if ctx.device == "cpu":
            return False, "vLLM overlaps batches on CUDA only"
        if ctx.num_gpus < 2:
            return False, "needs at least 2 GPUs, found 1"
        if ctx.data_parallel_size < 2 or not ctx.expert_parallel:
            return False, "needs data parallel with expert parallel; without them no tokens travel to other GPUs"
        return True, ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Say what is not there yet."""
        return self.unavailable(
            ctx, "it is switched on only after a trial on the machine, which comes with a later one"
        )
