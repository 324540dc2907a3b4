"""Which GPU holds which expert."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Decision


class ExpertPlacement(OptimizationPass):
    """Replicas and placement of experts from their measured load, so that no GPU waits for a busy one.

    Matters only with expert parallelism, where each GPU holds whole experts.
    """

    name = "expert_placement"
    flag = "expert-placement"
    title = "place and replicate experts by their load"
    limits = "needs a load profile of the model under real traffic; vLLM rebalances experts on CUDA only"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Needs experts, more than one device, and expert parallelism on CUDA."""
        if not ctx.model.is_moe:
            return False, "the model has no experts"
        if ctx.device == "cpu":
            return False, "vLLM rebalances experts on CUDA only"
        if ctx.num_gpus < 2:
            return False, "needs at least 2 GPUs, found 1"
        if not ctx.expert_parallel:
            return False, "needs expert parallelism; with TP every GPU has a slice of every expert"
        return True, ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Say what is not there yet."""
        return self.unavailable(ctx, "the load profile and the placement solver come with a later one")
