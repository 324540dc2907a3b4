"""Reads the scales of a quantisation scheme: what shares one, their bytes, whether they scale FP8 or MXFP4."""

from __future__ import annotations

import re

from moe_optimizer.inspection.config import Config, lookup
from moe_optimizer.inspection.scheme_bits import ALGORITHM, ALGORITHM_OF_LAYERS, TYPE_FIELDS, algorithm_bits
from moe_optimizer.specs.expert_formats import MXFP4_GROUP
from moe_optimizer.specs.model import Fp8Scales

_STRATEGIES = ("tensor", "channel", "block")
"""What may share a scale, as compressed-tensors names it; its "group" is MXFP8, a power of two for 32 weights."""
_QUARK_SCHEMES = ("per_tensor", "per_channel")
_NVFP4_GROUP = 16
_INTEGER_METHODS = ("gptq", "awq", "auto-round")
"""What the names of methods begin with that store integers only."""
_BLOCK_TEXT = re.compile(r"\d{1,6}x\d{1,6}")


def weight_block(scheme: Config) -> tuple[int, int] | None:
    """Return the rows and columns of the block of weights that shares a scale; None where there are no blocks.

    Raises:
        InputError: what stands for a block is none.
    """
    name, block = "weight_block_size", scheme.get("weight_block_size")
    if block is None:
        # vLLM's MoE layers need blocks of one size, so the first group that has any says it.
        groups = scheme.entries("config_groups").items()
        blocks = ((key, lookup(group, "weights.block_structure")) for key, group in groups)
        key, block = next(((key, each) for key, each in blocks if each is not None), ("", None))
        name = f"config_groups.{key}.weights.block_structure"
    if block is None:
        return None
    if isinstance(block, str) and _BLOCK_TEXT.fullmatch(block):
        block = [int(side) for side in block.split("x")]
    if isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
        return block[0], block[1]
    raise scheme.error(name, block, "two integers of at least 1, the rows and columns that share a scale")


def is_fp8(scheme: Config, method: str) -> bool:
    """Whether the scheme stores all its weights as 8-bit floating point."""
    if "fp8" in method:
        return True
    algorithm = scheme.get(ALGORITHM)
    if isinstance(algorithm, str):
        return algorithm.upper().startswith(("FP8", "MXFP8"))
    named = scheme.entries("config_groups").values()
    if named:
        return all((lookup(each, "weights.type"), lookup(each, "weights.num_bits")) == ("float", 8) for each in named)
    types = [scheme.get(name) for name in TYPE_FIELDS]
    return any(isinstance(each, str) and each.lower().startswith(("fp8", "float8")) for each in types)


def is_scaled_fp8(scheme: Config, method: str) -> bool:
    """Whether all that the scheme stores in 8 bits is FP8 (E4M3) with an FP32 scale per tensor, channel or block.

    False also where that cannot be told, and for ModelOpt's scales per channel and per block: vLLM's MoE layers read
    one scale for each tensor of its files (0.26 and 0.32).
    """
    if method == "fp8":
        return True
    if method == "modelopt":
        layers = scheme.entries(ALGORITHM_OF_LAYERS).values()
        named = [lookup(entry, "quant_algo") for entry in layers] if layers else [scheme.get(ALGORITHM)]
        return {str(name).upper() for name in named if algorithm_bits(name) == 8} == {"FP8"}
    if method == "compressed-tensors":
        weights = [lookup(group, "weights") for group in scheme.entries("config_groups").values()]
        eight_bits = [each for each in weights if lookup(each, "num_bits") == 8]
        return bool(eight_bits) and all(
            lookup(each, "type") == "float" and lookup(each, "strategy") in _STRATEGIES for each in eight_bits
        )
    if method == "quark":
        dtype, shared = (scheme.get(f"global_quant_config.weight.{name}") for name in ("dtype", "qscheme"))
        return dtype == "fp8_e4m3" and shared in _QUARK_SCHEMES
    return False


def fp8_scales(scheme: Config, method: str) -> Fp8Scales:
    """Return what shares a scale where `is_scaled_fp8` holds, else "". Files of the methods fp8 and modelopt have
    blocks or one scale per tensor; in the others' files the first group that says it does.

    Raises:
        InputError: what stands for a block is none.
    """
    if not is_scaled_fp8(scheme, method):
        return ""
    if weight_block(scheme) is not None:
        return "block"
    groups = scheme.entries("config_groups").values()
    said = [lookup(group, "weights.strategy") for group in groups]
    said.append(scheme.get("global_quant_config.weight.qscheme"))
    return "channel" if "channel" in said or "per_channel" in said else "tensor"


def scale_bytes(scheme: Config, method: str, bits: float) -> float:
    """Return the bytes of scales and zero points for each weight, as the method's checkpoints store them.

    Raises:
        InputError: no weight at all would share a scale.
    """
    block = weight_block(scheme)
    if block is not None:
        return 4 / (block[0] * block[1])
    if is_mxfp4(scheme, method):
        return 1 / MXFP4_GROUP
    entries = scheme.entries("config_groups")
    # Groups have any names; the first that says it stands for all.
    own = [f"config_groups.{key}.weights.group_size" for key, entry in entries.items()
           if lookup(entry, "weights.group_size") is not None]  # fmt: skip
    names = ("group_size", "quantization.group_size", "q_group_size", *own)
    group = scheme.get(names)
    if type(group) is int and group == 0:
        raise scheme.error(scheme.name_of(names), group, "the weights that share a scale, -1 for a whole channel")
    if type(group) is not int or group <= 0:
        return 0.0
    if group == _NVFP4_GROUP and not _in_integers(scheme, method):
        return 1 / group  # in FP8
    # GPTQ stores zero points for symmetric weights too, compressed-tensors does not.
    symmetric = [lookup(each, "weights.symmetric") for each in entries.values()]
    zero_point = 0 if symmetric and False not in symmetric else bits / 8
    return (2 + zero_point) / group


def _in_integers(scheme: Config, method: str) -> bool:
    types = [lookup(each, "weights.type") for each in scheme.entries("config_groups").values()]
    return "int" in types or method.startswith(_INTEGER_METHODS)


def is_mxfp4(scheme: Config, method: str) -> bool:
    """Whether the scheme stores its weights in MXFP4, with a power of two in a byte for each 32."""
    algorithm, form = scheme.get(ALGORITHM), scheme.get("format")
    named = (method, algorithm, form)
    if any(isinstance(each, str) and "mxfp4" in each.lower() for each in named):
        return True
    weight = scheme.get("global_quant_config.weight")
    return (lookup(weight, "dtype"), lookup(weight, "group_size")) == ("fp4", MXFP4_GROUP)
