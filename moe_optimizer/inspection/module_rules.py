"""Reads the rules of a quantisation scheme that hold for single modules and go before what it says of all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from moe_optimizer.inspection.config import Config


def bits_of_type(name: str) -> float | None:
    """Return the bits in a type's name ("fp8_e4m3", "int4"), or None when it has none."""
    match = re.search(r"(?:int|uint|float|fp|bf|Int|Float)(\d{1,2})", name)
    bits = int(match.group(1)) if match else 0
    return float(bits) if 1 <= bits <= 32 else None


def patterns_by_bits(scheme: Config) -> dict[float, list[str]]:
    """Return the modules with a number of bits of their own, in the form that `ModulePatterns` takes."""
    found: dict[float, list[str]] = {}
    for pattern, bits in (*_gptq(scheme), *_named(scheme), *_quark(scheme)):
        if bits is not None and 0 < bits <= 32:
            found.setdefault(bits, []).append(pattern)
    return found


def left_out(scheme: Config) -> list[str]:
    """Return the modules that a negative rule leaves in the model's own dtype (GPTQModel's "-:" entries)."""
    return [f"re:{key[2:]}" for key in _object(scheme, "dynamic") if key.startswith("-:")]


def _gptq(scheme: Config) -> Iterator[tuple[str, float | None]]:
    """GPTQModel: regular expressions, "+:" before them is optional."""
    for key, entry in _object(scheme, "dynamic").items():
        if not key.startswith("-:"):
            yield f"re:{key.removeprefix('+:')}", _number(entry, "bits")


def _named(scheme: Config) -> Iterator[tuple[str, float | None]]:
    """AutoRound: names of modules, or regular expressions."""
    for key, entry in _object(scheme, "extra_config").items():
        yield (f"re:{key}" if "*" in key else key), _number(entry, "bits")


def _quark(scheme: Config) -> Iterator[tuple[str, float | None]]:
    """Quark: shell patterns with a weight type."""
    for key, entry in _object(scheme, "layer_quant_config").items():
        weight = entry.get("weight") if isinstance(entry, dict) else None
        dtype = weight.get("dtype") if isinstance(weight, dict) else None
        yield key, bits_of_type(dtype) if isinstance(dtype, str) else None


def _object(scheme: Config, name: str) -> Mapping[str, object]:
    value = scheme.get(name)
    return value if isinstance(value, dict) else {}


def _number(entry: object, name: str) -> float | None:
    value = entry.get(name) if isinstance(entry, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
