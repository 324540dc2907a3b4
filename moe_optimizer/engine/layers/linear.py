"""`Linear`, `MergedLinear` and `Embedding`, on a `Layer` that knows how a checkpoint becomes its parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.errors import InputError

Shard = str | tuple[str, int] | None
"""Which part of a parameter a tensor is: a name, a name and an expert, or all of it."""


class Layer(nn.Module):
    """A layer whose parameters are stored as one tensor each; others override `load_weight`."""

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> None:
        """Copy a tensor of the checkpoint into `shard` of the parameter `name`."""
        assert shard is None, f"{type(self).__name__}.{name} has no shard {shard!r}"
        copy_checked(self.get_parameter(name), tensor)


def copy_checked(target: Tensor, source: Tensor) -> None:
    """Copy, converting the dtype.

    Raises:
        InputError: the shapes differ.
    """
    if target.shape != source.shape:
        raise InputError(f"got shape {list(source.shape)}, expected {list(target.shape)} by config.json")
    target.data.copy_(source)


class Linear(Layer):
    """y = x @ weight.T + bias."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Layer):
    """Projections of one input that a checkpoint stores apart: one product, their rows in the order of `sizes`."""

    def __init__(self, in_size: int, sizes: dict[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), in_size))
        self.bias = nn.Parameter(torch.empty(sum(sizes.values()))) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return each projection of the last dimension."""
        return F.linear(x, self.weight, self.bias).split(list(self.sizes.values()), dim=-1)

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> None:
        """Copy one projection into its rows."""
        rows = self.get_parameter(name).split(list(self.sizes.values()))
        copy_checked(rows[list(self.sizes).index(str(shard))], tensor)


class Embedding(Layer):
    """One vector per token of the vocabulary."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of the tokens."""
        return F.embedding(token_ids, self.weight)
