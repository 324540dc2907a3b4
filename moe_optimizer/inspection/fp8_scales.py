"""Reads the scales of a quantisation scheme: blocks that share one, and whether it is FP8 that they scale."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.scheme_bits import algorithm_bits

_STRATEGIES = ("tensor", "channel", "block")
"""What may share a scale, as compressed-tensors names it; its "group" is MXFP8, a power of two for 32 weights."""
_QUARK_SCHEMES = ("per_tensor", "per_channel")
_BLOCK_TEXT = re.compile(r"\d{1,6}x\d{1,6}")


def weight_block(scheme: Config) -> tuple[int, int] | None:
    """Return the rows and columns of the block of weights that shares a scale; None where there are no blocks."""
    block = scheme.get("weight_block_size")
    groups = scheme.get("config_groups")
    if block is None and isinstance(groups, dict):
        # vLLM's MoE layers need blocks of one size, so the first group that has any says it.
        blocks = (_weights(group).get("block_structure") for group in groups.values())
        block = next((each for each in blocks if each is not None), None)
    if isinstance(block, str) and _BLOCK_TEXT.fullmatch(block):
        block = [int(side) for side in block.split("x")]
    if isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
        return block[0], block[1]
    return None


def is_scaled_fp8(scheme: Config, method: str) -> bool:
    """Whether all that the scheme stores in 8 bits is FP8 (E4M3) with an FP32 scale per tensor, channel or block.

    False also where that cannot be told, and for ModelOpt's scales per channel and per block: vLLM's MoE layers read
    one scale for each tensor of its files (0.26 and 0.32).
    """
    if method == "fp8":
        return True
    if method == "modelopt":
        named = [name for name in _modelopt_algorithms(scheme) if algorithm_bits(name) == 8]
        return set(named) == {"FP8"}
    if method == "compressed-tensors":
        groups = scheme.get("config_groups")
        weights = [_weights(group) for group in groups.values()] if isinstance(groups, dict) else []
        eight_bits = [each for each in weights if each.get("num_bits") == 8]
        return bool(eight_bits) and all(
            each.get("type") == "float" and each.get("strategy") in _STRATEGIES for each in eight_bits
        )
    if method == "quark":
        dtype, shared = (scheme.get(f"global_quant_config.weight.{name}") for name in ("dtype", "qscheme"))
        return dtype == "fp8_e4m3" and shared in _QUARK_SCHEMES
    return False


def _modelopt_algorithms(scheme: Config) -> list[str]:
    """Return the algorithm of each layer where the files name them by layer, else that of all."""
    layers = scheme.get(("quantized_layers", "quantization.quantized_layers"))
    if isinstance(layers, dict) and layers:
        found = [entry.get("quant_algo") for entry in layers.values() if isinstance(entry, dict)]
    else:
        found = [scheme.get(("quant_algo", "quantization.quant_algo"))]
    return [name.upper() for name in found if isinstance(name, str)]


def _weights(group: object) -> Mapping[str, object]:
    weights = group.get("weights") if isinstance(group, dict) else None
    return weights if isinstance(weights, dict) else {}
