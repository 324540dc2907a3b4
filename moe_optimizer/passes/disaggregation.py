"""Prefill and decode in separate servers."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Decision


class Disaggregation(OptimizationPass):
    """Some GPUs only read prompts, the others only write answers, with a router between them.

    Long prompts then no longer hold up running answers.
    """

    name = "disaggregation"
    flag = "disaggregation"
    title = "separate servers for prefill and decode"
    limits = (
        "every part holds the whole model, and the cache travels between them; pays with long prompts and "
        "strict latency goals only"
    )

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """Needs a device for each part."""
        if ctx.device == "cuda" and ctx.num_gpus < 2:
            return False, "needs at least 2 GPUs, one for prefill and one for decode, found 1"
        if ctx.device == "cpu" and ctx.cpu.cores < 2:
            return False, "needs at least 2 CPU cores, found 1"
        return True, ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Say what is not there yet."""
        return self.unavailable(ctx, "starting two servers and a router comes with a later one")
