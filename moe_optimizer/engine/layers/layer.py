"""`Layer`: a module that knows how the tensors of a checkpoint become its parameters."""

from __future__ import annotations

from torch import Tensor, nn

from moe_optimizer.errors import InputError

Shard = str | tuple[str, int] | None
"""Which part of a parameter a tensor is: a name, a name and an expert, or all of it."""


class Layer(nn.Module):
    """A layer whose parameters are stored as one tensor each; others override `load_weight`."""

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> None:
        """Copy a tensor of the checkpoint into `shard` of the parameter `name`."""
        assert shard is None, f"{type(self).__name__}.{name} has no shard {shard!r}"
        copy_checked(self.get_parameter(name), tensor, name)


def copy_checked(target: Tensor, source: Tensor, name: str) -> None:
    """Copy, converting the dtype.

    Raises:
        InputError: the shapes differ.
    """
    if target.shape != source.shape:
        raise InputError(f"{name}: got shape {list(source.shape)}, expected {list(target.shape)} by config.json")
    target.data.copy_(source)
