"""`Linear`, and `MergedLinear`: several projections of the same input as one matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.layer import Layer, Shard, copy_checked


class Linear(Layer):
    """y = x @ weight.T + bias."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Projections that a checkpoint stores apart, their rows one behind the other in the order of `sizes`."""

    def __init__(self, in_size: int, sizes: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(in_size, sum(sizes.values()), bias=bias)
        self.sizes = sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return each projection of the last dimension."""
        return super().forward(x).split(list(self.sizes.values()), dim=-1)

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> None:
        """Copy one projection into its rows."""
        names = list(self.sizes)
        assert shard in names, f"got shard {shard!r}, expected one of {names}"
        begin = sum(self.sizes[before] for before in names[: names.index(shard)])
        copy_checked(self.get_parameter(name)[begin : begin + self.sizes[shard]], tensor, f"{shard}.{name}")
