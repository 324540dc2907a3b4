"""Experts pruned to two of four weights."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Decision


class Sparsity24(OptimizationPass):
    """Two of every four expert weights are zero and not stored.

    Off in every shipped profile: pruning without training costs quality, and only a quality gate may allow it.
    """

    name = "sparsity_24"
    flag = "sparsity"
    title = "2:4 sparse experts"
    limits = "unquantised experts only; vLLM has no such kernels any more, so it needs ours"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Needs experts that are not quantised."""
        if not ctx.model.is_moe:
            return False, "the model has no experts"
        if ctx.model.quant_method is not None:
            return False, f"needs unquantised expert weights to prune, found {ctx.model.quant_method}"
        return True, ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Say what is not there yet."""
        return self.unavailable(ctx, "the sparse kernel and the quality gate come with a later one")
