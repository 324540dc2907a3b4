"""CUDA graphs and compilation."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan_context.context import PlanContext

_VLLM_CAP = 512
"""vLLM captures up to min(2 * max-num-seqs, 512) unless told otherwise (its compilation configuration)."""
_STEP = 16
"""Spacing of vLLM's capture sizes above 256."""


class GraphCapture(OptimizationPass):
    """Which batch sizes are captured as CUDA graphs.

    On: vLLM's own compilation and capture, with the largest captured batch raised to the planned batch where vLLM's
    default stops below it; or, where the profile says eager, neither. Off: vLLM's default, whatever the batch.
    """

    name = "graph_capture"
    flag = "graph-capture"
    title = "CUDA graphs for every planned batch size"
    limits = "more graphs cost memory and start-up time; the memory plan counts vLLM's default sizes"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """CUDA graphs need a GPU; eager execution does not."""
        if ctx.device == "cpu" and not ctx.profile.passes.graph_capture.eager:
            return False, "CUDA graphs need a GPU; vLLM's own compilation for the CPU stays as it is"
        return True, ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return vLLM's default."""
        return self._decide(ctx, Status.OFF, "vLLM's default", reason, eager=_eager_pinned(ctx))

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the largest batch to capture."""
        section = ctx.profile.passes.graph_capture
        if _eager_pinned(ctx):
            return self._decide(ctx, Status.OFF, "eager", "--enforce-eager is given after --", eager=True)
        if section.eager:
            reason = f"{ctx.profile_origin} asks for plain execution: no compilation, no graphs, quick start"
            return self._decide(ctx, Status.ON, "eager", reason, eager=True, arguments=("--enforce-eager",))
        batch = ctx.pinned_integer("--max-num-seqs") or ctx.workload.batch_size
        default = min(2 * batch, _VLLM_CAP)
        if section.max_capture_size is None and batch <= default:
            reason = f"vLLM's own capture sizes reach {default}, which covers a batch of {batch}"
            return self._decide(ctx, Status.ON, f"graphs up to {default}", reason, eager=False)
        if section.max_capture_size is not None:
            size, reason = section.max_capture_size, f"{ctx.profile_origin} asks for it"
        else:
            size = -(-batch // _STEP) * _STEP
            reason = f"vLLM's own sizes end at {default}, and a batch of {batch} would run without a graph"
        arguments = ("--max-cudagraph-capture-size", str(size))
        return self._decide(ctx, Status.ON, f"graphs up to {size}", reason, eager=False, arguments=arguments)

    def _decide(
        self, ctx: PlanContext, status: Status, value: str, reason: str, *, eager: bool, arguments: tuple[str, ...] = ()
    ) -> Decision:
        applier = Applier.FLAGS if status is Status.ON else Applier.NONE
        graphs = ctx.device == "cuda" and not eager
        params = {"cuda_graphs": graphs}
        return self.decision(ctx, status, value, reason, applier, vllm_args=arguments, params=params)


def _eager_pinned(ctx: PlanContext) -> bool:
    return ctx.pinned.get("--enforce-eager", "false") != "false"
