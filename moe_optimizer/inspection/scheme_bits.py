"""Reads how many bits a quantisation scheme stores a weight in, wherever its method says it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.inspection.module_rules import bits_of_type
from moe_optimizer.inspection.quantization import Group

_UNNAMED_BITS: Mapping[str, float] = {"eetq": 8, "bitnet": 2}
"""Bits of a weight for methods that fix them, but do not name them as fp8 and experts_int8 do."""
_FIRST_NUMBER = re.compile(r"\d{1,2}")

BITS_FIELDS = ("bits", "w_bit", "weight_bits", "num_bits", "nbits", "wbits", "weight_quant_params.nbits")
TYPE_FIELDS = ("global_quant_config.weight.dtype", "quant_type.default._type", "quant_type", "weight_dtype", "weights")
"""Fields that may name the weights' type."""


def groups_of(scheme: Config, method: str) -> tuple[Group, ...]:
    """Return the groups of modules, most specific first; none when the bits cannot be told."""
    layers = scheme.get(("quantized_layers", "quantization.quantized_layers"))
    if isinstance(layers, dict) and layers:
        return _layer_groups(layers)
    bits = algorithm_bits(scheme.get(("quant_algo", "quantization.quant_algo")))
    if bits is not None:
        return (Group(bits, None),)
    for name in (*BITS_FIELDS, *(f"weights.{name}" for name in BITS_FIELDS)):
        if scheme.get(name) is not None:
            return (Group(_sensible(scheme, name), None),)
    named = scheme.get("config_groups")
    if isinstance(named, dict) and named:
        return tuple(group for entry in named.values() if (group := _config_group(entry)) is not None)
    if method == "bitsandbytes":
        return (Group(4 if scheme.flag(("load_in_4bit", "_load_in_4bit")) else 8, None),)
    bits = _UNNAMED_BITS.get(method) or bits_of_type(method) or _bits_in_nested_type(scheme) or _codebook_bits(scheme)
    return (Group(bits, None),) if bits else ()


def algorithm_bits(algorithm: object) -> float | None:
    """Return the bits of a weight for an algorithm that ModelOpt names: its first number ("W4A8_NVFP4_FP8": 4)."""
    found = _FIRST_NUMBER.search(algorithm) if isinstance(algorithm, str) else None
    return float(found[0]) if found and 1 <= int(found[0]) <= 32 else None


def _layer_groups(layers: Mapping[str, object]) -> tuple[Group, ...]:
    names: dict[float, list[str]] = {}
    for name, entry in layers.items():
        bits = algorithm_bits(entry.get("quant_algo") if isinstance(entry, dict) else None)
        if bits is not None:
            names.setdefault(bits, []).append(name)
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
