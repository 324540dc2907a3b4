"""`Linear`, `MergedLinear` and `Embedding`, on a `Layer` that knows how a checkpoint becomes its parameters.

With several ranks each holds a slice: of the outputs, of the inputs, or of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.errors import InputError

Shard = str | tuple[str, int] | None
"""Which part of a parameter a tensor is: a name, a name and an expert, or all of it."""


class Layer(nn.Module):
    """A layer whose parameters are stored as one tensor each; others override `load_weight`."""

    sliced: tuple[int, Ranks] = (0, ALONE)
    """The dimension of the parameters of which each rank holds a slice; one that it holds whole stays whole."""

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        """Copy a tensor of the checkpoint into `shard` of the parameter `name`; return how many elements it filled."""
        assert shard is None, f"{type(self).__name__}.{name} has no shard {shard!r}"
        return copy_slice(self.get_parameter(name), tensor, *self.sliced)


def copy_slice(target: Tensor, source: Tensor, dim: int = 0, ranks: Ranks = ALONE) -> int:
    """Copy this rank's slice of `source` along `dim`, converting the dtype; return how many elements.

    Raises:
        InputError: the shapes differ.
    """
    source = ranks.slice_of(source, dim, target.shape[dim])
    if target.shape != source.shape:
        raise InputError(f"got shape {list(source.shape)}, expected {list(target.shape)} by config.json")
    target.data.copy_(source)
    return target.numel()


class Linear(Layer):
    """y = x @ weight.T + bias. Several ranks multiply a slice of x each, and add the products up."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks, self.sliced = ranks, (-1, ranks)
        self.weight = nn.Parameter(torch.empty(out_size, ranks.share(in_size, "inputs of a projection")))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = self.ranks.sum(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class MergedLinear(Layer):
    """Projections of one input that a checkpoint stores apart: one product, their rows in the order of `sizes`.

    `sizes` are the outputs of each on this rank, which holds a slice of them.
    """

    def __init__(self, in_size: int, sizes: dict[str, int], *, bias: bool = False, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.sizes, self.ranks = sizes, ranks
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), in_size))
        self.bias = nn.Parameter(torch.empty(sum(sizes.values()))) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight, self.bias).split(list(self.sizes.values()), dim=-1)

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        rows = dict(zip(self.sizes, self.get_parameter(name).split(list(self.sizes.values())), strict=True))
        return copy_slice(rows[str(shard)], tensor, 0, self.ranks)


class Embedding(Layer):
    """One vector per token of the vocabulary, and as the model's last layer one logit."""

    def __init__(self, vocab_size: int, size: int, *, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks, self.sliced = ranks, (0, ranks)
        self.weight = nn.Parameter(torch.empty(ranks.share(vocab_size, "tokens of the vocabulary"), size))

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.ranks.rank * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight))
        return self.ranks.sum(F.embedding(local * mine, self.weight) * mine[:, None])

    def logits(self, x_TH: Tensor) -> Tensor:
        return self.ranks.gather(F.linear(x_TH, self.weight))
