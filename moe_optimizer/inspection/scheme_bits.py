"""Reads how many bits a quantisation scheme stores a weight in, wherever its method says it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from moe_optimizer.inspection.config import Config, Names, lookup
from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.inspection.quantization import Group

_UNNAMED_BITS: Mapping[str, float] = {"eetq": 8, "bitnet": 2}
"""Bits of a weight for methods that fix them, but do not name them as fp8 and experts_int8 do."""
_FIRST_NUMBER = re.compile(r"\d{1,2}")
_TYPE_BITS = re.compile(r"(?:int|uint|float|fp|bf|Int|Float)(\d{1,2})")
_MOST_BITS = 32

BITS_FIELDS = ("bits", "w_bit", "weight_bits", "num_bits", "nbits", "wbits", "weight_quant_params.nbits")
TYPE_FIELDS = ("global_quant_config.weight.dtype", "quant_type.default._type", "quant_type", "weight_dtype", "weights")
"""Fields that may name the weights' type."""
ALGORITHM: Names = ("quant_algo", "quantization.quant_algo")
ALGORITHM_OF_LAYERS: Names = ("quantized_layers", "quantization.quantized_layers")
IN_4_BITS: Names = ("load_in_4bit", "_load_in_4bit")


def special_groups(scheme: Config) -> tuple[Group, ...]:
    """Return the groups of modules with a number of bits of their own, which goes before what the scheme says of all.

    GPTQModel names them by regular expressions ("+:" before them is optional), AutoRound by names or regular
    expressions, Quark by shell patterns with a weight type.
    """
    gptq = scheme.entries("dynamic").items()
    rules = [(f"re:{key.removeprefix('+:')}", _own_bits(entry)) for key, entry in gptq if not key.startswith("-:")]
    auto_round = scheme.entries("extra_config").items()
    rules += [(f"re:{key}" if "*" in key else key, _own_bits(entry)) for key, entry in auto_round]
    quark = scheme.entries("layer_quant_config").items()
    rules += [(key, bits_of_type(lookup(entry, "weight.dtype"))) for key, entry in quark]
    return _grouped(rules)


def groups_of(scheme: Config, method: str) -> tuple[Group, ...]:
    """Return the groups of modules, most specific first; none when the bits cannot be told."""
    layers = scheme.entries(ALGORITHM_OF_LAYERS)
    if layers:
        return _grouped((name, algorithm_bits(lookup(entry, "quant_algo"))) for name, entry in layers.items())
    bits = algorithm_bits(scheme.get(ALGORITHM))
    if bits is not None:
        return (Group(bits, None),)
    for name in (*BITS_FIELDS, *(f"weights.{name}" for name in BITS_FIELDS)):
        if scheme.get(name) is not None:
            return (Group(_sensible(scheme, name), None),)
    named = scheme.entries("config_groups")
    if named:
        return tuple(group for entry in named.values() if (group := _config_group(entry)) is not None)
    if method == "bitsandbytes":
        return (Group(4 if scheme.flag(IN_4_BITS) else 8, None),)
    nested_types = (bits_of_type(scheme.get(name)) for name in TYPE_FIELDS)
    bits = _UNNAMED_BITS.get(method) or bits_of_type(method) or next(filter(None, nested_types), None)
    bits = bits or _codebook_bits(scheme)
    return (Group(bits, None),) if bits else ()


def algorithm_bits(algorithm: object) -> float | None:
    """Return the bits of a weight for an algorithm that ModelOpt names: its first number ("W4A8_NVFP4_FP8": 4)."""
    found = _FIRST_NUMBER.search(algorithm) if isinstance(algorithm, str) else None
    return float(found[0]) if found and 1 <= int(found[0]) <= _MOST_BITS else None


def bits_of_type(name: object) -> float | None:
    """Return the bits in a type's name as Quark and torchao write it ("fp8_e4m3", "int4"), None when it has none."""
    found = _TYPE_BITS.search(name) if isinstance(name, str) else None
    return float(found[1]) if found and 1 <= int(found[1]) <= _MOST_BITS else None


def _grouped(rules: Iterable[tuple[str, float | None]]) -> tuple[Group, ...]:
    names: dict[float, list[str]] = {}
    for name, bits in rules:
        if bits is not None and 0 < bits <= _MOST_BITS:
            names.setdefault(bits, []).append(name)
    return tuple(Group(bits, ModulePatterns(entries)) for bits, entries in sorted(names.items()))


def _own_bits(entry: object) -> float | None:
    bits = lookup(entry, "bits")
    return float(bits) if isinstance(bits, (int, float)) and not isinstance(bits, bool) else None


def _config_group(entry: object) -> Group | None:
    bits, targets = lookup(entry, "weights.num_bits"), lookup(entry, "targets")
    if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not 0 < bits <= _MOST_BITS:
        return None
    if not isinstance(targets, list) or any(isinstance(name, str) and name.endswith("Linear") for name in targets):
        return Group(bits, None)
    return Group(bits, ModulePatterns(targets))


def _sensible(scheme: Config, name: str) -> float:
    bits = scheme.number(name, 0.0)
    if not 0 < bits <= _MOST_BITS:
        raise scheme.error(name, scheme.get(name), "bits of a weight, from 1 to 32")
    return bits


def _codebook_bits(scheme: Config) -> float | None:
    """Bits of a weight that indices into codebooks stand for, a group of weights at a time (AQLM)."""
    index = scheme.number("nbits_per_codebook", 0.0) * scheme.number("num_codebooks", 1.0)
    group = scheme.number("in_group_size", 1.0) * scheme.number("out_group_size", 1.0)
    bits = index / group if group > 0 else 0.0
    return bits if 0 < bits <= _MOST_BITS else None
