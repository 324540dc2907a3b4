"""Decides whether the tokens of each expert are counted."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_kernel import has_gpt_oss_experts
from moe_optimizer.specs.vllm_runs import version_numbers

_CONFLICTS = {
    "--enable-dbo": "a router sees half of the tokens at a time",
    "--enable-return-routed-experts": "vLLM's own capture takes the same place",
}
"""Arguments of `vllm serve` with which tokens cannot be counted, and why."""
_TELLS_ROUTING = (0, 28)
"""First vLLM that tells a plugin which experts a token goes to where the kernel of the experts routes it itself."""
_RECORDS = {
    "cpu": "benchmarks/records/2026-11-20_epyc_expert_load.json",
    "cuda": "benchmarks/records/2026-11-20_h200_expert_load.json",
}


class ExpertLoad(OptimizationPass):
    """Tokens per expert and layer, counted in the workers while they serve.

    Changes no output. What it finds says whether placing experts would pay, and is what they are placed by.
    """

    name = "expert_load"
    flag = "expert-load"
    title = "count the tokens that each expert is given"
    limits = "tokens of rejected speculation count; not with data parallelism or dual batch overlap"
    no_gain = "it counts, and makes nothing faster"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Needs experts, and a router that sees exactly the tokens of its own step."""
        copies = ctx.parallelism.data_parallel_size
        if copies > 1:
            return f"data parallelism ({copies}): a router sees the tokens of other replicas too"
        for flag, why in _CONFLICTS.items():
            if ctx.pinned.is_on(flag):
                return f"{flag}: {why}"
        return ""

    def choose(self, ctx: PlanContext) -> Decision:
        """Count, unless the model is on several machines: the cost is measured on both kinds of device."""
        wish, _ = ctx.wish(self.name)
        if wish is Wish.AUTO and ctx.parallelism.pipeline_parallel_size > 1:
            return self.when_off(ctx, "the counts of a model on several machines would lie on all of them")
        if wish is Wish.AUTO and _routed_by_vllms_kernel(ctx):
            return self.when_off(
                ctx, "vLLM's kernels of gpt-oss route tokens themselves, and vLLM before 0.28 cannot tell"
            )
        return self.decision(
            ctx,
            Status.ON,
            "counts per layer and expert",
            "shows which experts the traffic uses; in layers of Qwen3-30B-A3B's shape that took less than a hundredth "
            "of a step",
            Applier.PLUGIN,
            evidence=(_RECORDS[ctx.device],),
        )


def _routed_by_vllms_kernel(ctx: PlanContext) -> bool:
    """Return whether a kernel of vLLM's routes the tokens and this vLLM does not say where to."""
    vllm = ctx.software.vllm
    return (
        ctx.device == "cuda"
        and has_gpt_oss_experts(ctx.model)
        and ctx.decided["flash_dmoe"].status is not Status.ON
        and vllm is not None
        and version_numbers(vllm.version) < _TELLS_ROUTING
    )
