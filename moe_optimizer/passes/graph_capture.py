"""CUDA graphs and compilation."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass, PlanContext
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish

_VLLM_CAP = 512
"""vLLM captures up to min(2 * max-num-seqs, 512) unless told otherwise (its compilation configuration)."""
_STEP = 16
"""Spacing of vLLM's capture sizes above 256."""


class GraphCapture(OptimizationPass):
    """Which batch sizes are captured as CUDA graphs.

    On: vLLM's own compilation and capture, with the largest captured batch raised to the planned batch where
    vLLM's default stops below it. Off: plain eager execution (--enforce-eager), on the CPU build as well.
    Limits: more graphs cost memory and start-up time; the memory plan counts them with vLLM's default sizes.
    """

    name = "graph_capture"
    flag = "graph-capture"
    title = "CUDA graphs and compilation (off: eager execution)"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """CUDA graphs need a GPU."""
        if ctx.device == "cpu":
            return False, "CUDA graphs need a GPU; vLLM's own compilation for the CPU stays as it is"
        return True, ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return eager execution when it is wished, nothing when capture is only impossible."""
        if ctx.wish(self.name)[0] is not Wish.OFF:
            return super().when_off(ctx, reason)
        return self.decision(ctx, Status.OFF, "eager", reason, Applier.FLAGS, vllm_args=("--enforce-eager",))

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the largest batch to capture."""
        if ctx.pinned.get("--enforce-eager", "false") != "false":
            return self.decision(ctx, Status.OFF, "eager", "--enforce-eager is given after --", Applier.NONE)
        batch = ctx.pinned_integer("--max-num-seqs") or ctx.workload.batch_size
        asked = ctx.profile.passes.graph_capture.max_capture_size
        default = min(2 * batch, _VLLM_CAP)
        if asked is None and batch <= default:
            reason = f"vLLM's own capture sizes reach {default}, which covers a batch of {batch}"
            return self.decision(ctx, Status.ON, f"up to {default}", reason, Applier.FLAGS)
        size = asked if asked is not None else -(-batch // _STEP) * _STEP
        reason = (
            f"the profile asks for {size}"
            if asked is not None
            else f"vLLM's own sizes end at {default}, and a batch of {batch} would run without a graph"
        )
        return self.decision(
            ctx,
            Status.ON,
            f"up to {size}",
            reason,
            Applier.FLAGS,
            rejected={f"up to {default}": "vLLM's default"},
            vllm_args=("--max-cudagraph-capture-size", str(size)),
        )
