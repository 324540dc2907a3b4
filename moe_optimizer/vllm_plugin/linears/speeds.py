"""Times our kernel beside stock vLLM's product on a model's own weights while a worker loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.vllm_plugin import graph_times
from moe_optimizer.vllm_plugin.linears.dense_layers import DenseLayer

TOKENS = (1, 2, 4, 8)
"""For which both are timed; what wins at two neighbours wins between them."""
_COLD_BYTES = 160 << 20
"""Of weights that are read in turns: three times what L2 of an H100 or H200 holds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of one product, with what makes its tokens before it."""

    tokens: int
    ours_us: float
    stock_us: float

    @property
    def is_faster(self) -> bool:
        """Whether ours is faster by more than noise."""
        return self.ours_us <= graph_times.MARGIN * self.stock_us


def why_not_cold(layers: Sequence[DenseLayer]) -> str:
    """Return why the weights of layers of one kind cannot be timed as a model reads them, or ""."""
    held = sum(_bytes(layer.w) for layer in layers)
    if held >= _COLD_BYTES:
        return ""
    return f"{held >> 20} MiB of {len(layers)} such layers stay in L2 when only they are read"


def times(layers: Sequence[DenseLayer]) -> tuple[Timed, ...]:
    """Time both on layers of one kind, from few tokens on, up to where ours is not faster."""
    found = []
    for tokens in TOKENS:
        found.append(_timed(layers, tokens))
        if not found[-1].is_faster:
            break
    return tuple(found)


def faster_up_to(timed: Sequence[Timed]) -> int:
    """Return up to how many tokens ours is faster; 0: it is not for one."""
    return max((each.tokens for each in timed if each.is_faster), default=0)


def _timed(layers: Sequence[DenseLayer], tokens: int) -> Timed:
    cold = _cold(layers)
    w = cold[0].w
    source = torch.randn(tokens, w.shape[1], device=w.device).bfloat16()
    x = torch.empty_like(source)

    def captured(product: Callable[[DenseLayer, Tensor], Tensor]) -> torch.cuda.CUDAGraph:
        # What makes the tokens stands between two products, as in a model: without it the one would overlap the other.
        # It is a kernel, as there: a launch after a copy (a memcpy node) cannot start early.
        return graph_times.captured([lambda layer=layer: product(layer, torch.mul(source, 1, out=x)) for layer in cold])

    graphs = (captured(DenseLayer.ours), captured(DenseLayer.stock))
    ours, stock = (each / len(cold) for each in graph_times.least_us(graphs))
    return Timed(tokens, ours, stock)


def _cold(layers: Sequence[DenseLayer]) -> Sequence[DenseLayer]:
    """Return the first ones whose weights are more than L2 holds together."""
    held = 0
    for count, layer in enumerate(layers, start=1):
        held += _bytes(layer.w)
        if held >= _COLD_BYTES:
            return layers[:count]
    return layers


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
