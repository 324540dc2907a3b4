"""Chooses the batch sizes that vLLM captures as CUDA graphs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.plan_context.context import PlanContext

_VLLM_CAP = 512
"""vLLM captures up to min(2 * max-num-seqs, 512) unless told otherwise (its compilation configuration)."""
_STEP = 16
"""Spacing of vLLM's capture sizes from 256 on."""
_SMALL_STEP = 8
"""Their spacing below."""
_FLAG = "--max-cudagraph-capture-size"
_SIZES_FLAG = "--cudagraph-capture-sizes"
_MOST_PADDING = 8
"""Chosen: a batch is padded by at most one eighth of itself, where vLLM's own steps are finer: above 128."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


class GraphCapture(OptimizationPass):
    """Which batch sizes are captured as CUDA graphs.

    On: vLLM's own compilation and capture, with the largest captured batch raised to the planned batch where vLLM's
    default stops below it; or, where the profile says eager, neither. Off: vLLM's default, whatever the batch.
    Stands after the scheduler, whose requests and tokens of a step bound what vLLM captures.
    """

    name = "graph_capture"
    flag = "graph-capture"
    title = "CUDA graphs for every planned batch size"
    limits = "more graphs cost memory and start-up time; the memory plan counts vLLM's default sizes"

    def supported(self, ctx: PlanContext) -> tuple[bool, str]:
        """CUDA graphs need a GPU and no argument of the user's against them; eager execution needs neither."""
        without = _argument_against_graphs(ctx.pinned)
        if without:
            return False, f"{without} is given after --"
        if ctx.device == "cpu" and not _eager(ctx):
            return False, "CUDA graphs need a GPU; vLLM's own compilation for the CPU stays as it is"
        return True, ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return vLLM's default."""
        eager = bool(_argument_against_graphs(ctx.pinned))
        return self._decide(ctx, Status.OFF, "no graphs" if eager else "vLLM's default", reason, eager=eager)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the largest batch to capture."""
        if _eager(ctx):
            reason = f"{ctx.profile_origin} asks for plain execution: no compilation, no graphs, quick start"
            eager = ServeArguments("--enforce-eager")
            return self._decide(ctx, Status.ON, "eager", reason, eager=True, arguments=eager)
        # Of a larger batch no more than these run at once.
        batch = min(ctx.workload.batch_size, ctx.scheduler.max_num_seqs)
        flag, size = _largest_given(ctx.pinned)
        if flag:
            return self._graphs(ctx, size, f"{flag} is given after --", batch)
        default = min(2 * ctx.scheduler.max_num_seqs, _VLLM_CAP)
        asked = ctx.profile.passes.graph_capture.max_capture_size
        if asked is not None:
            size, reason = asked, f"{ctx.profile_origin} asks for it"
            return self._graphs(ctx, size, reason, batch, arguments=ServeArguments(_FLAG, str(size)))
        if batch <= default:
            return self._graphs(ctx, default, f"vLLM's own capture sizes cover a batch of {batch}", batch)
        return self._beyond_vllms_sizes(ctx, default, batch)

    def _beyond_vllms_sizes(self, ctx: PlanContext, default: int, batch: int) -> Decision:
        """Return graphs up to the batch, of fewer sizes than vLLM would capture up to there."""
        size = _captured(-(-batch // _STEP) * _STEP, ctx.scheduler.max_num_batched_tokens)
        sizes, vllms = _sizes_up_to(size), _vllms_sizes(size)
        reason = (
            f"vLLM's own sizes end at {default}, and a batch of {batch} would run without a graph; "
            f"{len(sizes)} sizes are captured instead of its {vllms} up to there: the same below 128, "
            "above a batch is padded by at most an eighth"
        )
        rejected = {f"all {vllms} sizes": f"{vllms / len(sizes):.1f}x the time and memory of capturing"}
        arguments = ServeArguments(_SIZES_FLAG, *map(str, sizes))
        return self._graphs(ctx, size, reason, batch, arguments=arguments, rejected=rejected)

    def _graphs(
        self,
        ctx: PlanContext,
        size: int,
        reason: str,
        batch: int,
        *,
        arguments: ServeArguments = NO_ARGUMENTS,
        rejected: Mapping[str, str] = _NOTHING,
    ) -> Decision:
        """Return the decision for graphs up to the largest size that vLLM makes of `size`."""
        captured = _captured(size, ctx.scheduler.max_num_batched_tokens)
        warning = f"graph_capture: a batch of {batch} runs without a graph, they end at {captured}: {reason}"
        return self._decide(
            ctx,
            Status.ON,
            f"graphs up to {captured}",
            reason,
            eager=False,
            arguments=arguments,
            max_capture_size=captured,
            warnings=(warning,) if captured < batch else (),
            rejected=rejected,
        )

    def _decide(
        self,
        ctx: PlanContext,
        status: Status,
        value: str,
        reason: str,
        *,
        eager: bool,
        arguments: ServeArguments = NO_ARGUMENTS,
        max_capture_size: int = 0,
        warnings: tuple[str, ...] = (),
        rejected: Mapping[str, str] = _NOTHING,
    ) -> Decision:
        return self.decision(
            ctx,
            status,
            value,
            reason,
            Applier.FLAGS if status is Status.ON else Applier.NONE,
            vllm_args=arguments,
            params=GraphCaptureParams(
                cuda_graphs=ctx.device == "cuda" and not eager, max_capture_size=max_capture_size
            ),
            warnings=warnings,
            rejected=rejected,
        )


def _eager(ctx: PlanContext) -> bool:
    """Whether the profile asks for plain execution, and no flag for graphs."""
    return ctx.profile.passes.graph_capture.eager and not ctx.is_asked_by_flag(GraphCapture.name)


def _sizes_up_to(most: int) -> list[int]:
    """Return the sizes to capture, the largest included: steps grow with the size."""
    sizes, size = {most, *(size for size in (1, 2, 4) if size < most)}, _SMALL_STEP
    while size < most:
        sizes.add(size)
        # The largest power of two that is no more than an eighth of the size, and at least vLLM's own step.
        size += max(_SMALL_STEP, 1 << (size // _MOST_PADDING).bit_length() - 1)
    return sorted(sizes)


def _vllms_sizes(most: int) -> int:
    """Return how many sizes vLLM captures when it is told only the largest."""
    small, large = range(_SMALL_STEP, min(most + 1, 256), _SMALL_STEP), range(256, most + 1, _STEP)
    return len({most, 1, 2, 4, *small, *large})


def _captured(size: int, tokens: int) -> int:
    """Return the largest size that vLLM captures when it is told `size`: it leaves out what is not on its grid, but
    takes the tokens of a step, beyond which it needs none.
    """
    if tokens <= size:
        return tokens
    if size < _SMALL_STEP:
        return max(captured for captured in (1, 2, 4) if captured <= size)
    step = _STEP if size >= 256 else _SMALL_STEP
    return size // step * step


def _argument_against_graphs(given: ServeArguments) -> str:
    """Return the user's own argument with which vLLM captures nothing; "" where there is none."""
    if given.is_on("--enforce-eager"):
        return "--enforce-eager"
    if given.value("--optimization-level") == "0":
        return "-O0"
    if given.value(_FLAG) == "0":
        return f"{_FLAG} 0"
    mode = _compilation_config(given).get("cudagraph_mode")
    return f"cudagraph_mode {mode}" if mode is not None and str(mode).upper() == "NONE" else ""


def _largest_given(given: ServeArguments) -> tuple[str, int]:
    """Return the user's own argument that says what is captured, and the largest size by it; ("", 0): there is none."""
    config = _compilation_config(given)
    for flag, text in (
        ("--cudagraph-capture-sizes", given.value("--cudagraph-capture-sizes")),
        (_FLAG, given.value(_FLAG)),
        ("cudagraph_capture_sizes", config.get("cudagraph_capture_sizes")),
        ("max_cudagraph_capture_size", config.get("max_cudagraph_capture_size")),
    ):
        sizes = [int(number) for number in re.findall(r"\d{1,9}", str(text))]
        if any(sizes):
            return flag, max(sizes)
    return "", 0


def _compilation_config(given: ServeArguments) -> dict[str, Any]:
    """Return vLLM's compilation configuration as the user gives it; {} where it is none or not to be read: what vLLM
    cannot read either, it refuses by itself.
    """
    try:
        config = json.loads(given.value("--compilation-config") or "")
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
