"""Where the slices of a model's matrices do not divide into FP8 blocks, as vLLM's online conversion handles them."""

from __future__ import annotations

from moe_optimizer.costs.weights import FP8_BLOCK
from moe_optimizer.specs.model import ModelSpec


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
    return _padded(model.expert_hidden_size) * _padded(width)


def _padded(size: float) -> float:
    return -(-size // FP8_BLOCK) * FP8_BLOCK / size if size else 1.0


def _gated_width(model: ModelSpec, params: int, layers: int) -> int:
    # Rounded: a gate of one row beside shared experts is in their count.
    return round(params / layers / (3 * model.hidden_size))
