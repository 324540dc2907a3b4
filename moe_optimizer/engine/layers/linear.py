"""`Linear`, `MergedLinear` and `Embedding`, on a `Layer` that knows where a checkpoint's tensors go.

With several ranks each holds a slice: of the outputs, of the inputs, or of the vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.errors import InputError
from moe_optimizer.ops import few_rows, onednn_product


class Place(NamedTuple):
    """Where a tensor of a checkpoint goes."""

    target: Tensor
    """A parameter or a part of one; empty where only other ranks hold it."""
    dim: int = 0
    """The dimension of which each rank holds a slice; what it holds whole stays whole."""
    ranks: Ranks = ALONE

    def fill(self, tensor: Tensor) -> None:
        """Copy this rank's slice of a tensor, converting the dtype.

        Raises:
            InputError: the shapes differ.
        """
        if not self.target.numel():
            return
        source = self.ranks.slice_of(tensor, self.dim, self.target.shape[self.dim])
        if self.target.shape != source.shape:
            raise InputError(f"got shape {list(source.shape)}, expected {list(self.target.shape)} by config.json")
        self.target.copy_(source)


class Layer(nn.Module):
    """A layer whose parameters are stored as one tensor each; others override `places`."""

    sliced: tuple[int, Ranks] = (0, ALONE)

    def places(self, name: str) -> Iterator[tuple[str, Place]]:
        """Yield what a checkpoint calls the tensors of this layer, whose own name is `name`, and where they go."""
        for parameter, target in self.named_parameters():
            yield f"{name}.{parameter}", Place(target.data, *self.sliced)


class Matrix(Layer):
    """A layer that multiplies by its weight [outputs, inputs]."""

    weight: Tensor
    packed: Tensor | None = None
    """The weight in oneDNN's order, in which a large product takes half the time of torch's own."""
    _packed_version = 0

    def multiplied(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias; few rows in float32, where bits need not be torch's, by our own kernel."""
        if x.dtype is torch.float32 and (y := few_rows.product(x, self.weight, bias)) is not None:
            return y
        if self.packed is not None and self.weight._version != self._packed_version:
            self.pack()
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        return onednn_product.product(x, self.packed, bias)

    def pack(self) -> None:
        """Hold a second copy of the weight for `multiplied`, where torch has oneDNN for its dtype here.

        It is made again once the weight has changed in place; what changes `weight.data` has to call this itself.
        """
        self.packed, self._packed_version = onednn_product.packed(self.weight.data), self.weight._version


class Linear(Matrix):
    """y = x @ weight.T + bias. Several ranks multiply a slice of x each, and add the products up."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks, self.sliced = ranks, (-1, ranks)
        self.weight = nn.Parameter(torch.empty(out_size, ranks.share(in_size, "inputs of a projection")))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return self.multiplied(x, self.bias)
        y = self.ranks.sum(self.multiplied(x))
        return y if self.bias is None else y + self.bias


class MergedLinear(Matrix):
    """Projections of one input that a checkpoint stores apart: one product, their rows in the order of `sizes`.

    `sizes` are the outputs of each on this rank, which holds a slice of them, by the names of the projections.
    """

    def __init__(self, in_size: int, sizes: dict[str, int], *, bias: bool = False, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.sizes, self.ranks = sizes, ranks
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), in_size))
        self.bias = nn.Parameter(torch.empty(sum(sizes.values()))) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.split(self.product(x))

    def product(self, x: Tensor) -> Tensor:
        """Return the outputs side by side."""
        return self.multiplied(x, self.bias)

    def split(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return outputs.split(list(self.sizes.values()), dim=-1)

    def places(self, name: str) -> Iterator[tuple[str, Place]]:
        for parameter, target in self.named_parameters():
            rows = target.data.split(list(self.sizes.values()))
            for projection, part in zip(self.sizes, rows, strict=True):
                yield f"{name.rpartition('.')[0]}.{projection}_proj.{parameter}", Place(part, 0, self.ranks)


class Embedding(Matrix):
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
        return self.ranks.gather(self.multiplied(x_TH))
