"""Chooses the sizes of steps that vLLM captures as CUDA graphs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.costs.memory import GRAPH_BYTES_PER_LAYER
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.layouts.constants import PROMPT_LEDGER
from moe_optimizer.layouts.step import StepModel, Tokens
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status
from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.graph_arguments import (
    LARGEST_FLAG,
    SIZES_FLAG,
    argument_against_graphs,
    exchange_against_graphs,
    is_eager,
    may_capture_prompts,
    sizes_given,
)
from moe_optimizer.plan_context.layout_question import layout_question
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.quantity import Quantity, Source
from moe_optimizer.specs.workload import WorkloadSpec

_VLLM_CAP = 512
"""vLLM captures up to min(2 * max-num-seqs, 512) unless told otherwise (its compilation configuration)."""
_STEP = 16
"""Spacing of vLLM's capture sizes from 256 on."""
_SMALL_STEP = 8
"""Their spacing below."""
_STEPS = {0: _SMALL_STEP, 128: _STEP, 512: 2 * _STEP}
"""Chosen, from so many tokens on: vLLM's spacing doubled where the padding is at most 1 % of a step."""
_LEAST_PROMPT_STEP = 16
"""Chosen: spacing of the sizes that only prompts need, else a quarter of the power of two below."""
_WORTH = 0.9
"""Chosen: of the time of its launches, what a step may take at most that is padded to a size worth capturing."""
_ATTENTION_PARTS = 32
"""Read from vLLM's FlashAttention 3 backend: into so many parts a step up to the largest graph may divide the keys of a
sequence, each with sums in FP32. They lie beside what vLLM's profiling of memory sees."""
STEP_US, TOKEN_US = 23_570, 21.2
"""A decode step of T tokens takes about the one and T times the other, the attention of a token more apart: 24,925 us
at 64 requests, and 1,355 us more for 64 more (vLLM's kernels, Qwen3-30B-A3B in BF16, _PADDING_SOURCE)."""
_PADDING_SOURCE = "benchmarks/records/2026-11-22_h100_decode_step.json"
_PROMPT_SOURCES = (PROMPT_LEDGER, "benchmarks/records/2026-11-26_h100_prompt_step_graphs.json")


class GraphCapture(OptimizationPass):
    """Which sizes of steps are captured as CUDA graphs.

    On: vLLM's own compilation and capture. Where a step that reads prompts would wait for the launches of its kernels,
    sizes beyond vLLM's are captured for it; so is the largest batch where vLLM's default stops below it. Or, where the
    profile says eager, nothing. Off: vLLM's default, whatever the batch.
    Stands after the scheduler, whose requests and tokens of a step bound what vLLM captures.
    """

    name = "graph_capture"
    flag = "graph-capture"
    title = "CUDA graphs for every planned batch size, and for steps that read prompts"
    limits = "more graphs cost memory and start-up time"
    no_gain = "how long a step that only decodes waits for launches without a graph is in no record"

    def why_not(self, ctx: PlanContext) -> str:
        """CUDA graphs need a GPU and no argument of the user's against them; eager execution needs neither."""
        without = argument_against_graphs(ctx.pinned)
        if without:
            return f"{without} is given after --"
        if exchange := exchange_against_graphs(ctx):
            return f"vLLM captures nothing with the all-to-all {exchange}"
        if ctx.device == "cpu" and not is_eager(ctx):
            return "CUDA graphs need a GPU; vLLM's own compilation for the CPU stays as it is"
        return ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return vLLM's default."""
        eager = bool(argument_against_graphs(ctx.pinned) or exchange_against_graphs(ctx))
        return self._decide(ctx, Status.OFF, "no graphs" if eager else "vLLM's default", reason, eager=eager)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the sizes to capture."""
        if is_eager(ctx):
            reason = f"{ctx.profile_origin} asks for plain execution: no compilation, no graphs, quick start"
            eager = ServeArguments("--enforce-eager")
            slower = "it starts sooner and computes more slowly: no record says by how much"
            return self._decide(ctx, Status.ON, "eager", reason, eager=True, vllm_args=eager, no_gain=slower)
        # Of a larger batch no more than these run at once.
        tokens, each = ctx.scheduler.max_num_batched_tokens, 1 + ctx.draft_tokens
        batch = ctx.step_tokens(min(ctx.workload.batch_size, ctx.scheduler.max_num_seqs))
        asked = ctx.profile.passes.graph_capture.max_capture_size
        flag, given = sizes_given(ctx.pinned)
        fields: dict[str, Any] = {}
        if flag:
            captured, reason = captured_of(given, tokens, each), f"{flag} is given after --"
        elif asked is not None:
            captured, reason = captured_of((asked,), tokens, each), f"{ctx.profile_origin} asks for it"
            fields["vllm_args"] = ServeArguments(LARGEST_FLAG, str(asked))
        else:
            captured, reason, fields = _chosen(ctx, batch, each)
        layers = math.ceil(ctx.model.num_layers / ctx.parallelism.pipeline_parallel_size)
        reason += f"; the graphs take about {layers * GRAPH_BYTES_PER_LAYER / 1e9:.1f} GB of each GPU"
        unit = " tokens" if each > 1 else ""
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


@dataclass(frozen=True, slots=True)
class _WaitingPrompts:
    """Steps that read prompts and would wait for the launches of their kernels."""

    sizes: Sequence[int]
    """To capture, ascending: one of each is shorter than its launches."""
    prompt: int
    """Tokens of the workload's prompt, or the nearest that gets one of the sizes."""
    launched_us: float
    """Of such a step without a graph; here and below it is predicted."""
    graph_us: float

    @property
    def cost(self) -> str:
        """What stock vLLM has them take."""
        ms, graph_ms = self.launched_us / 1000, self.graph_us / 1000
        return f"a step that reads {self.prompt} prompt tokens takes {ms:.0f} ms of launches in place of {graph_ms:.0f}"

    def gain(self, workload: WorkloadSpec) -> dict[str, Any]:
        """Return what a decision says of it."""
        if self.prompt != workload.input_tokens:
            without = f"prompts of {workload.input_tokens} tokens alone are read as in stock vLLM; not beside others"
            return {"no_gain": without}
        ratio = Quantity(self.launched_us / self.graph_us, "ratio", Source.MODELLED, ", ".join(_PROMPT_SOURCES))
        return {"gain": Gain(metric=f"time of the step that reads a prompt of {self.prompt} tokens", ratio=ratio)}


def _chosen(ctx: PlanContext, batch: int, each: int) -> tuple[int, str, dict[str, Any]]:
    """Return the largest size that is captured, why, and what more the decision has.

    Args:
        ctx: after the scheduler.
        batch: tokens of a step that only decodes.
        each: tokens of a request in it.
    """
    tokens = ctx.scheduler.max_num_batched_tokens
    default = min(2 * ctx.scheduler.max_num_seqs * each, _VLLM_CAP)
    size = captured_of((default,), tokens, each)
    if not (covered := batch <= size):
        size = min(-(-batch // _STEP) * _STEP, tokens)
    waiting = _waiting_prompts(ctx, size)
    if covered and waiting is None:
        reason = f"vLLM's own capture sizes {'cover' if batch <= size else 'end before'} a batch of {batch}"
        return size, reason, {"no_gain": "stock vLLM captures the same"} | (_beside_fewer(size) if each == 1 else {})
    sizes, vllms = sorted({*_sizes_up_to(size), min(batch, size)}), _vllms_sizes(size)
    reasons, rejected, evidence, fields = [], {}, [], {}
    if not covered:
        reasons.append(f"vLLM's own sizes end at {default}, and a batch of {batch} would run without a graph")
    if waiting is not None:
        reasons.append(f"{waiting.cost}: sizes up to {waiting.sizes[-1]} for such steps")
        rejected[f"vLLM's own {len(vllms)} sizes"] = waiting.cost
        evidence += _PROMPT_SOURCES
        fields |= waiting.gain(ctx.workload)
    if len(sizes) < len(vllms):
        reasons.append(
            f"{len(sizes)} sizes up to {size} in place of vLLM's {len(vllms)}: the same below 128, above a batch is "
            f"padded by at most {_padding(sizes, vllms):.1%} of a step more"
        )
        rejected[f"all {len(vllms)} sizes"] = f"{len(vllms) / len(sizes):.1f}x the time and memory of capturing"
        evidence.append(_PADDING_SOURCE)
    sizes += () if waiting is None else waiting.sizes
    fields |= {"rejected": rejected, "evidence": tuple(evidence)}
    sizes = sorted({min(-(-size // each), tokens // each) * each for size in sizes})
    fields["vllm_args"] = ServeArguments(SIZES_FLAG, *map(str, sizes))
    return sizes[-1], "; ".join(reasons), fields


def _waiting_prompts(ctx: PlanContext, captured: int) -> _WaitingPrompts | None:
    """Return the sizes beyond `captured` that steps gain from which read prompts; None: there are none.

    Of the copies of a server vLLM has all compute as many tokens as the one that reads a prompt, which the step model
    assumes of every step.
    """
    split, most = ctx.parallelism, ctx.scheduler.max_num_batched_tokens
    if not may_capture_prompts(ctx) or ctx.decided["dual_batch_overlap"].status is Status.ON:
        return None  # half batches are captured by rules of their own
    layout = Layout(
        tensor_parallel_size=split.tensor_parallel_size,
        data_parallel_size=split.data_parallel_size,
        expert_parallel=split.expert_parallel,
        pipeline_parallel_size=split.pipeline_parallel_size,
    )
    try:
        model = StepModel(layout_question(ctx), layout)
    except UnsupportedError:
        return None  # the GPU's rates are not known
    room, worth_us = min(most, _room(ctx)), _WORTH * model.launches_us
    sizes: list[int] = []
    while (size := _next_size(sizes[-1] if sizes else captured, most)) <= room and _us(model, size) < worth_us:
        sizes.append(size)
    if not sizes:
        return None
    prompt = min(max(ctx.workload.input_tokens, captured + 1), sizes[-1])
    return _WaitingPrompts(sizes, prompt, model.launches_us, _us(model, _padded(prompt, sizes)))


def _room(ctx: PlanContext) -> int:
    """Return the tokens whose parts of attention take half of what the server leaves alone on its GPU."""
    attention = ctx.model.attention
    heads = 0 if attention.kind in ("mla", "none") else attention.num_heads / ctx.parallelism.tensor_parallel_size
    token_bytes = max(1.0, 4 * _ATTENTION_PARTS * heads * attention.head_dim)
    return int((1 - ctx.gpu_memory_utilization) * ctx.gpu.memory.value / 2 / token_bytes)


def _us(model: StepModel, prompt: int) -> float:
    return model.graph_us(Tokens(0, 0, prompt, prompt))


def _next_size(size: int, most: int) -> int:
    """Return the next size to capture: at most a quarter more, and the tokens of a whole step in between."""
    step = max(_LEAST_PROMPT_STEP, (1 << size.bit_length()) // 8)
    following = (size // step + 1) * step
    return most if size < most < following else following


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
    return sorted({most, *(size for size in (1, 2, 4) if size < most), *small, *large})


def captured_of(sizes: Sequence[int], tokens: int, each: int) -> int:
    """Return the largest size that vLLM captures.

    Args:
        sizes: what it is told, or the largest alone: then it leaves out what is not on its grid, but takes the tokens
            of a step.
        tokens: most of a step; beyond them it needs none.
        each: tokens of a request in a step that only decodes. Sizes become multiples of them, rounded up; what is then
            above the largest is left out.
    """
    most = min(max(sizes), tokens)
    known = [size for size in sizes if size <= most] if len(sizes) > 1 else _vllms_sizes(_on_grid(most, tokens))
    rounded = [-(-size // each) * each for size in known]
    return max((size for size in rounded if size <= max(known)), default=each)


def _on_grid(size: int, tokens: int) -> int:
    if tokens <= size:
        return tokens
    if size < _SMALL_STEP:
        return max(captured for captured in (1, 2, 4) if captured <= size)
    step = _STEP if size >= 256 else _SMALL_STEP
    return size // step * step
