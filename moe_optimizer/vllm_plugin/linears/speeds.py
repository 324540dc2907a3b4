"""Times our kernel beside cuBLAS on a model's own weights while a worker loads, and chooses by that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops.cuda_variants import SkinnyVariant
from moe_optimizer.ops.skinny_gemm import multiply
from moe_optimizer.vllm_plugin.linears.op import Choice

TOKENS = (1, 2, 4, 8, 16)
"""For which both are timed; what wins at two neighbours wins between them."""
_COLD_BYTES = 160 << 20
"""Of weights that are read in turns: three times what L2 of an H100 or H200 holds."""
_MAX_CALLS = 32
_REPETITIONS = 7
_MARGIN = 0.97
"""Chosen: ours has to take at most so much of cuBLAS's time, so that noise does not choose."""

Weight = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of one product, after a copy of its tokens."""

    tokens: int
    ours_us: float
    cublas_us: float

    @property
    def is_faster(self) -> bool:
        """Whether ours is faster by more than noise."""
        return self.ours_us <= _MARGIN * self.cublas_us


def why_not_cold(weights: Sequence[Weight]) -> str:
    """Return why weights of one shape cannot be timed as a model reads them, or ""."""
    held = sum(w.numel() * w.element_size() for w, _ in weights)
    if held >= _COLD_BYTES:
        return ""
    return f"{held >> 20} MiB of {len(weights)} such layers stay in L2 when only they are read"


def fastest(weights: Sequence[Weight], variants: Sequence[SkinnyVariant]) -> SkinnyVariant:
    """Return the variant that is fastest for one token."""
    if len(variants) == 1:
        return variants[0]
    return min(variants, key=lambda variant: _timed(weights, variant, 1).ours_us)


def times(weights: Sequence[Weight], variant: SkinnyVariant) -> tuple[Timed, ...]:
    """Time both on weights of one shape, from few tokens on, up to where ours is not faster."""
    found = []
    for tokens in TOKENS:
        measured = _timed(weights, variant, tokens)
        found.append(measured)
        if not measured.is_faster:
            break
    return tuple(found)


def choice(variant: SkinnyVariant, timed: Sequence[Timed]) -> Choice | None:
    """Return up to how many tokens ours computes; None: it is not faster for one."""
    faster = [each.tokens for each in timed if each.is_faster]
    return Choice(variant, faster[-1]) if faster else None


def _timed(weights: Sequence[Weight], variant: SkinnyVariant, tokens: int) -> Timed:
    calls = _calls(weights)
    source = torch.randn(tokens, calls[0][0].shape[1], device=calls[0][0].device).to(calls[0][0].dtype)

    def side(product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> torch.cuda.CUDAGraph:
        # What makes the tokens stands between two products, as in a model: without it the one would overlap the other.
        x = torch.empty_like(source)
        return _captured([lambda w=w, bias=bias: (x.copy_(source), product(x, w, bias)) for w, bias in calls])

    graphs = {
        "ours": side(lambda x, w, bias: multiply(x, w, bias, variant)),
        "cublas": side(torch.nn.functional.linear),
    }
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for repetition in range(_REPETITIONS + 1):  # the first one warms up
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repetition:
                samples[name].append(1000 * start.elapsed_time(end) / len(calls))
    ours, cublas = (statistics.median(samples[name]) for name in ("ours", "cublas"))
    return Timed(tokens, ours, cublas)


def _calls(weights: Sequence[Weight]) -> list[Weight]:
    """Return weights that together are more than L2 holds, all of a kind, in the model's order."""
    found, held = [], 0
    for w, bias in weights:
        found.append((w, bias))
        held += w.numel() * w.element_size()
        if held >= _COLD_BYTES or len(found) == _MAX_CALLS:
            break
    return found


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # what is allocated or loaded once is not in the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph
