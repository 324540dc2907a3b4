"""Finds slices of a model's matrices that are no whole number of FP8 blocks, and what vLLM makes of them."""

from __future__ import annotations

import math

from moe_optimizer.costs.weights import FP8_BLOCK
from moe_optimizer.specs.model import ModelSpec

_FINEST = 32
"""vLLM's own limit: rows and columns of the smallest block that its Triton kernel is given."""


def ragged_linear(model: ModelSpec, num_devices: int) -> str:
    """Return which linear layer vLLM cannot multiply with scales per block, or "" when none is known.

    It quantises a layer's input in groups of 128 and stops at an input that is no multiple of that: the model width,
    or what a device has of the attention heads and of the dense and shared feed-forward parts. The widths of those are
    derived from their parameter counts, as gated MLPs.
    """
    widths = {"the model width": float(model.hidden_size)}
    if model.attention.kind in ("mha", "gqa"):
        widths["the attention heads"] = model.attention.num_heads * model.attention.head_dim / num_devices
    dense_layers = model.num_layers - model.num_moe_layers
    if dense_layers:
        widths["the dense MLP"] = _gated_width(model, model.dense_params, dense_layers) / num_devices
    if model.num_moe_layers:
        widths["the shared experts"] = (
            _gated_width(model, model.shared_expert_params, model.num_moe_layers) / num_devices
        )
    for name, width in widths.items():
        if width % FP8_BLOCK:
            return f"{name} of a device: {width:g} wide, vLLM needs a multiple of {FP8_BLOCK}"
    return ""


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


def _gated_width(model: ModelSpec, params: int, layers: int) -> int:
    # Rounded: a gate of one row beside shared experts is in their count.
    return round(params / layers / (3 * model.hidden_size))
