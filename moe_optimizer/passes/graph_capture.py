"""Chooses the batch sizes that vLLM captures as CUDA graphs."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import GraphCaptureParams, SpeculationParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext

_VLLM_CAP = 512
"""vLLM captures up to min(2 * max-num-seqs, 512) unless told otherwise (its compilation configuration)."""
_STEP = 16
"""Spacing of vLLM's capture sizes from 256 on."""
_SMALL_STEP = 8
"""Their spacing below."""
_FLAG = "--max-cudagraph-capture-size"
_COMPILATION_FLAG = "--compilation-config"
"""Where its value cannot be read, it counts as empty: what vLLM cannot read either, it refuses by itself."""
_SIZES_FLAG = "--cudagraph-capture-sizes"
_STEPS = {0: _SMALL_STEP, 128: _STEP, 512: 2 * _STEP}
"""Chosen, from so many tokens on: vLLM's spacing doubled where the padding is at most 1 % of a step."""
STEP_US, TOKEN_US = 23_570, 21.2
"""A decode step of T tokens takes about the one and T times the other, the attention of a token more apart: 24,925 us
at 64 requests, and 1,355 us more for 64 more (vLLM's kernels, Qwen3-30B-A3B in BF16, _PADDING_SOURCE)."""
_PADDING_SOURCE = "benchmarks/records/2026-11-22_h100_decode_step.json"


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
    no_gain = "how long a step that only decodes waits for launches without a graph is in no record"

    def why_not(self, ctx: PlanContext) -> str:
        """CUDA graphs need a GPU and no argument of the user's against them; eager execution needs neither."""
        without = _argument_against_graphs(ctx.pinned)
        if without:
            return f"{without} is given after --"
        if ctx.device == "cpu" and not _eager(ctx):
            return "CUDA graphs need a GPU; vLLM's own compilation for the CPU stays as it is"
        return ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return vLLM's default."""
        eager = bool(_argument_against_graphs(ctx.pinned))
        return self._decide(ctx, Status.OFF, "no graphs" if eager else "vLLM's default", reason, eager=eager)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the largest batch to capture."""
        if _eager(ctx):
            reason = f"{ctx.profile_origin} asks for plain execution: no compilation, no graphs, quick start"
            eager = ServeArguments("--enforce-eager")
            slower = "it starts sooner and computes more slowly: no record says by how much"
            return self._decide(ctx, Status.ON, "eager", reason, eager=True, vllm_args=eager, no_gain=slower)
        # Of a larger batch no more than these run at once.
        drafting = ctx.params(SpeculationParams)
        each = 1 + (drafting.draft_tokens if drafting else 0)
        batch = ctx.step_tokens(min(ctx.workload.batch_size, ctx.scheduler.max_num_seqs))
        default = min(2 * ctx.scheduler.max_num_seqs * each, _VLLM_CAP)
        asked = ctx.profile.passes.graph_capture.max_capture_size
        flag, size = _largest_given(ctx.pinned)
        fields: dict[str, Any] = {}
        if flag:
            reason = f"{flag} is given after --"
        elif asked is not None:
            size, reason = asked, f"{ctx.profile_origin} asks for it"
            fields["vllm_args"] = ServeArguments(_FLAG, str(size))
        elif batch <= default or each > 1:
            # Only vLLM knows which sizes fit the steps that check drafts: multiples of their tokens.
            size = default // each * each
            reason = f"vLLM's own capture sizes {'cover' if batch <= size else 'end before'} a batch of {batch}"
            fields["no_gain"] = "stock vLLM captures the same"
            if each == 1:
                fields |= _beside_fewer(_captured(size, ctx.scheduler.max_num_batched_tokens))
        else:
            size = _captured(-(-batch // _STEP) * _STEP, ctx.scheduler.max_num_batched_tokens)
            sizes, vllms = _sizes_up_to(size), _vllms_sizes(size)
            reason = (
                f"vLLM's own sizes end at {default}, and a batch of {batch} would run without a graph; "
                f"{len(sizes)} sizes are captured instead of its {len(vllms)} up to there: the same below 128, above "
                f"a batch is padded by at most {_padding(sizes, vllms):.1%} of a step more"
            )
            more = f"{len(vllms) / len(sizes):.1f}x the time and memory of capturing"
            fields["evidence"] = (_PADDING_SOURCE,)
            fields["rejected"] = {f"all {len(vllms)} sizes": more}
            fields["vllm_args"] = ServeArguments(_SIZES_FLAG, *map(str, sizes))
        captured = _captured(size, ctx.scheduler.max_num_batched_tokens)
        unit = " tokens" if drafting else ""
        warning = f"graph_capture: a batch of {batch}{unit} runs without a graph, they end at {captured}: {reason}"
        return self._decide(
            ctx,
            Status.ON,
            f"graphs up to {captured}",
            reason,
            eager=False,
            max_capture_size=captured,
            warnings=(warning,) if captured < batch else (),
            **fields,
        )

    def _decide(
        self,
        ctx: PlanContext,
        status: Status,
        value: str,
        reason: str,
        *,
        eager: bool,
        max_capture_size: int = 0,
        **fields: Any,
    ) -> Decision:
        params = GraphCaptureParams(cuda_graphs=ctx.device == "cuda" and not eager, max_capture_size=max_capture_size)
        applier = Applier.FLAGS if status is Status.ON else Applier.NONE
        return self.decision(ctx, status, value, reason, applier, params=params, **fields)


def _eager(ctx: PlanContext) -> bool:
    """Whether the profile asks for plain execution, and no flag for graphs."""
    return ctx.profile.passes.graph_capture.eager and not ctx.is_asked_by_flag(GraphCapture.name)


def _beside_fewer(size: int) -> dict[str, Any]:
    """Return what speaks against fewer sizes than vLLM's own up to this one; {} where there are no more."""
    sizes, vllms = _sizes_up_to(size), _vllms_sizes(size)
    if len(sizes) == len(vllms):
        return {}
    less = f"{len(sizes) / len(vllms):.1f}x the time and memory of capturing"
    padded = f"a batch above 128 padded by up to {_padding(sizes, vllms):.1%} of a step more"
    return {
        "rejected": {f"{len(sizes)} of its {len(vllms)} sizes": f"{less}, {padded}"},
        "evidence": (_PADDING_SOURCE,),
    }


def _padding(sizes: Sequence[int], vllms: Sequence[int]) -> float:
    """Return by which share of its step a batch is padded at most more than with vLLM's sizes."""
    more = ((tokens, _padded(tokens, sizes) - _padded(tokens, vllms)) for tokens in range(1, sizes[-1] + 1))
    return max(padding * TOKEN_US / (STEP_US + tokens * TOKEN_US) for tokens, padding in more)


def _padded(tokens: int, sizes: Sequence[int]) -> int:
    return sizes[bisect.bisect_left(sizes, tokens)]


def _sizes_up_to(most: int) -> list[int]:
    """Return the sizes to capture, the largest included: steps grow with the size."""
    sizes, size = {most, *(size for size in (1, 2, 4) if size < most)}, _SMALL_STEP
    while size < most:
        sizes.add(size)
        size += max(step for least, step in _STEPS.items() if least <= size)
    return sorted(sizes)


def _vllms_sizes(most: int) -> list[int]:
    """Return the sizes that vLLM captures when it is told only the largest."""
    small, large = range(_SMALL_STEP, min(most + 1, 256), _SMALL_STEP), range(256, most + 1, _STEP)
    return sorted({most, 1, 2, 4, *small, *large})


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
    mode = (given.json_object(_COMPILATION_FLAG) or {}).get("cudagraph_mode")
    return f"cudagraph_mode {mode}" if mode is not None and str(mode).upper() == "NONE" else ""


def _largest_given(given: ServeArguments) -> tuple[str, int]:
    """Return the user's own argument that says what is captured, and the largest size by it; ("", 0): there is none."""
    config = given.json_object(_COMPILATION_FLAG) or {}
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
