"""How many bits a quantisation scheme stores a weight in, wherever its method says it."""

from __future__ import annotations

from collections.abc import Mapping

from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.inspection.module_rules import bits_of_type
from moe_optimizer.inspection.quantization import Group

METHOD_BITS: Mapping[str, float] = {
    "fp8": 8,
    "fbgemm_fp8": 8,
    "ptpc_fp8": 8,
    "mxfp8": 8,
    "mxfp4": 4,
    "gpt_oss_mxfp4": 4,
    "nvfp4": 4,
    "modelopt_fp4": 4,
    "modelopt_mxfp8": 8,
    "petit_nvfp4": 4,
    "experts_int8": 8,
    "tpu_int8": 8,
    "eetq": 8,
    "bitnet": 2,
}
"""Bits of a weight for methods whose name fixes them."""

ALGORITHM_BITS: Mapping[str, float] = {
    "FP8": 8,
    "FP8_PB_WO": 8,
    "FP8_PER_CHANNEL_PER_TOKEN": 8,
    "MXFP8": 8,
    "INT8": 8,
    "INT8_SQ": 8,
    "W8A8_SQ_PER_CHANNEL": 8,
    "W8A16": 8,
    "NVFP4": 4,
    "W4A16_NVFP4": 4,
    "NVFP4_AWQ": 4,
    "MXFP4": 4,
    "W4A16": 4,
    "W4A16_AWQ": 4,
    "INT4_AWQ": 4,
    "W4A8_AWQ": 4,
    "W4A8_NVFP4_FP8": 4,
    "W4A8_MXFP4_FP8": 4,
}
"""Bits of a weight for the algorithms that ModelOpt names."""

BITS_FIELDS = ("bits", "w_bit", "weight_bits", "num_bits", "nbits", "wbits", "weight_quant_params.nbits")
TYPE_FIELDS = ("global_quant_config.weight.dtype", "quant_type.default._type", "quant_type", "weight_dtype", "weights")
"""Fields that may name the weights' type."""


def groups_of(scheme: Config, method: str) -> tuple[Group, ...]:
    """Return the groups of modules, most specific first; none when the bits cannot be told."""
    layers = scheme.get(("quantized_layers", "quantization.quantized_layers"))
    if isinstance(layers, dict) and layers:
        return _layer_groups(layers)
    algorithm = scheme.get(("quant_algo", "quantization.quant_algo"))
    if isinstance(algorithm, str) and algorithm.upper() in ALGORITHM_BITS:
        return (Group(ALGORITHM_BITS[algorithm.upper()], None),)
    for name in (*BITS_FIELDS, *(f"weights.{name}" for name in BITS_FIELDS)):
        if scheme.get(name) is not None:
            return (Group(_sensible(scheme, name), None),)
    named = scheme.get("config_groups")
    if isinstance(named, dict) and named:
        return tuple(group for entry in named.values() if (group := _config_group(entry)) is not None)
    if method == "bitsandbytes":
        return (Group(4 if scheme.flag(("load_in_4bit", "_load_in_4bit")) else 8, None),)
    bits = METHOD_BITS.get(method) or _bits_in_nested_type(scheme) or _codebook_bits(scheme)
    return (Group(bits, None),) if bits else ()


def _layer_groups(layers: Mapping[str, object]) -> tuple[Group, ...]:
    names: dict[float, list[str]] = {}
    for name, entry in layers.items():
        algorithm = str(entry.get("quant_algo")).upper() if isinstance(entry, dict) else ""
        if algorithm in ALGORITHM_BITS:
            names.setdefault(ALGORITHM_BITS[algorithm], []).append(name)
    return tuple(Group(bits, ModulePatterns(entries)) for bits, entries in sorted(names.items()))


def _config_group(entry: object) -> Group | None:
    weights = entry.get("weights") if isinstance(entry, dict) else None
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not 0 < bits <= 32:
        return None
    targets = entry.get("targets") if isinstance(entry, dict) else None
    if not isinstance(targets, list) or any(isinstance(name, str) and name.endswith("Linear") for name in targets):
        return Group(bits, None)
    return Group(bits, ModulePatterns(targets))


def _sensible(scheme: Config, name: str) -> float:
    bits = scheme.number(name, 0.0)
    if not 0 < bits <= 32:
        raise scheme.error(name, scheme.get(name), "bits of a weight, from 1 to 32")
    return bits


def _codebook_bits(scheme: Config) -> float | None:
    """Bits of a weight that indices into codebooks stand for, a group of weights at a time (AQLM)."""
    index = scheme.number("nbits_per_codebook", 0.0) * scheme.number("num_codebooks", 1.0)
    group = scheme.number("in_group_size", 1.0) * scheme.number("out_group_size", 1.0)
    bits = index / group if group > 0 else 0.0
    return bits if 0 < bits <= 32 else None


def _bits_in_nested_type(scheme: Config) -> float | None:
    """Bits from a type's name inside the scheme, as Quark and torchao write it ("fp8_e4m3", "int4")."""
    for name in TYPE_FIELDS:
        value = scheme.get(name)
        bits = bits_of_type(value) if isinstance(value, str) else None
        if bits is not None:
            return bits
    return None
