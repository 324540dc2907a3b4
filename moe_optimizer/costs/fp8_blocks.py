"""Finds slices of a model's experts that are no whole number of FP8 blocks, and what vLLM makes of them."""

from __future__ import annotations

import math

from moe_optimizer.costs.weights import FP8_BLOCK
from moe_optimizer.specs.model import ModelSpec

_FINEST = 32
"""vLLM's own limit: rows and columns of the smallest block that its Triton kernel is given."""


def padded_experts(model: ModelSpec, num_devices: int, *, expert_parallel: bool) -> float:
    """Return how many times the weights of its routed experts a device holds: vLLM fills them up to whole blocks."""
    width = model.moe_intermediate_size / (1 if expert_parallel else num_devices)
    sizes = (model.expert_hidden_size, width)
    return math.prod(whole_blocks(size) / size if size else 1.0 for size in sizes)


def whole_blocks(size: float) -> int:
    """Return a width filled up to whole blocks, as vLLM's online conversion per block allocates it."""
    return math.ceil(size / FP8_BLOCK) * FP8_BLOCK


def block_of_slice(block: tuple[int, int], width: int, hidden_size: int, num_slices: int) -> tuple[int, int]:
    """Return rows and columns that share a scale once the experts of an FP8 checkpoint are loaded in slices.

    Where a slice of the expert width is no whole number of blocks, vLLM (since 0.29; before, it refuses) takes the
    largest smaller block that divides everything, down to 32.
    """
    rows, columns = block
    if width % rows == 0 and (num_slices == 1 or width % columns == 0):
        return block
    finer = math.gcd(rows, columns, width, hidden_size)
    return (finer, finer) if finer >= _FINEST else block
