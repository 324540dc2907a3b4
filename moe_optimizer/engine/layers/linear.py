"""`Linear`, `MergedLinear` and `Embedding`, on a `Layer` that knows how a checkpoint becomes its parameters.

With several ranks each holds a slice: of the outputs, of the inputs, or of the vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.errors import InputError

Shard = str | tuple[str, int] | None
"""Which part of a parameter a tensor is: a name, a name and an expert, or all of it."""


class Layer(nn.Module):
    """A layer whose parameters are stored as one tensor each; others override `load_weight`."""

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        """Copy a tensor of the checkpoint into `shard` of the parameter `name`; return how many elements it filled."""
        assert shard is None, f"{type(self).__name__}.{name} has no shard {shard!r}"
        return copy_checked(self.get_parameter(name), tensor)


def copy_checked(target: Tensor, source: Tensor) -> int:
    """Copy, converting the dtype; return how many elements.

    Raises:
        InputError: the shapes differ.
    """
    if target.shape != source.shape:
        raise InputError(f"got shape {list(source.shape)}, expected {list(target.shape)} by config.json")
    target.data.copy_(source)
    return target.numel()


class Linear(Layer):
    """y = x @ weight.T + bias.

    Args:
        in_size: of the whole product.
        out_size: likewise.
        bias: whether there is one.
        split: "inputs" has each rank multiply its slice of x, and adds the products up; None is whole on each rank.
        ranks: that share it.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool = False,
        split: Literal["inputs"] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.ranks = ranks if split else ALONE
        self.weight = nn.Parameter(torch.empty(out_size, self.ranks.share(in_size, "inputs of a projection")))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        if self.ranks.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = self.ranks.sum(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        """Copy this rank's slice."""
        if name == "weight" and tensor.dim() == 2:
            tensor = self.ranks.slice_of(tensor, 1, self.weight.shape[1])
        return super().load_weight(name, tensor, shard)


class MergedLinear(Layer):
    """Projections of one input that a checkpoint stores apart: one product, their rows in the order of `sizes`.

    Args:
        in_size: of each.
        sizes: outputs of each on this rank, which holds a slice of them.
        bias: whether there is one.
        ranks: that share it.
    """

    def __init__(self, in_size: int, sizes: dict[str, int], *, bias: bool = False, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.sizes, self.ranks = sizes, ranks
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), in_size))
        self.bias = nn.Parameter(torch.empty(sum(sizes.values()))) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return each projection of the last dimension."""
        return F.linear(x, self.weight, self.bias).split(list(self.sizes.values()), dim=-1)

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        """Copy this rank's slice of one projection into its rows."""
        rows = self.get_parameter(name).split(list(self.sizes.values()))
        target = rows[list(self.sizes).index(str(shard))]
        return copy_checked(target, self.ranks.slice_of(tensor, 0, len(target)))


class Embedding(Layer):
    """One vector per token of the vocabulary, and as the model's last layer one logit."""

    def __init__(self, vocab_size: int, size: int, *, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks
        self.first = ranks.rank * ranks.share(vocab_size, "tokens of the vocabulary")
        self.weight = nn.Parameter(torch.empty(ranks.share(vocab_size, "tokens of the vocabulary"), size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of the tokens."""
        if self.ranks.size == 1:
            return F.embedding(token_ids, self.weight)
        mine = (token_ids >= self.first) & (token_ids < self.first + len(self.weight))
        vectors = F.embedding((token_ids - self.first) * mine, self.weight)
        return self.ranks.sum(vectors * mine[:, None])

    def logits(self, x_TH: Tensor) -> Tensor:
        """Return the logit of every token."""
        return self.ranks.gather(F.linear(x_TH, self.weight))

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        """Copy this rank's slice."""
        return super().load_weight(name, self.ranks.slice_of(tensor, 0, len(self.weight)), shard)
