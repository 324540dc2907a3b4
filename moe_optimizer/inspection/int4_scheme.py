"""Reads how an INT4 checkpoint stores its integers: what shares a scale, and in which order columns belong to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_optimizer.inspection.config import Config, lookup
from moe_optimizer.specs.model import Int4Scheme

_BITS = 4
_WHOLE_ROW = -1
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_AWQ_VERSION = "gemm"
_PACKED = "pack-quantized"
_ORDERED = ("group", "dynamic")
"""Act-order of compressed-tensors that leaves the columns where they were; "weight" and "static" move them once."""
_OF_A_MODULE = ("bits", "group_size", "sym", "desc_act")


def int4_scheme(scheme: Config, method: str) -> Int4Scheme | None:
    """Return how a checkpoint of GPTQ, AWQ or compressed-tensors stores what it has in four bits.

    None: another method, another packing of the same method, activations that are quantised too, or modules that
    differ among themselves.
    """
    if method == "gptq":
        return _gptq(scheme)
    if method == "awq":
        return _awq(scheme)
    return _compressed_tensors(scheme) if method == "compressed-tensors" else None


def _gptq(scheme: Config) -> Int4Scheme | None:
    overrides = (entry for key, entry in scheme.entries("dynamic").items() if not key.startswith("-:"))
    apart = any(lookup(entry, name) is not None for entry in overrides for name in _OF_A_MODULE)
    packing = scheme.get(("checkpoint_format", "format"))
    if apart or (packing is not None and packing not in _GPTQ_FORMATS):
        return None
    group = scheme.integer("group_size", _WHOLE_ROW, minimum=_WHOLE_ROW)
    assert group is not None
    return Int4Scheme(
        group=group,
        zero_points=not scheme.flag("sym", default=True),
        act_order=scheme.flag("desc_act") and group != _WHOLE_ROW,
    )


def _awq(scheme: Config) -> Int4Scheme | None:
    if scheme.text("version", _AWQ_VERSION).lower() != _AWQ_VERSION:
        return None
    group = scheme.integer(("q_group_size", "group_size"), _WHOLE_ROW, minimum=_WHOLE_ROW)
    assert group is not None
    return Int4Scheme(group=group, zero_points=scheme.flag("zero_point", default=True), act_order=False)


def _compressed_tensors(scheme: Config) -> Int4Scheme | None:
    found = set(_of_groups(scheme))
    return found.pop() if len(found) == 1 else None


def _of_groups(scheme: Config) -> Iterator[Int4Scheme | None]:
    """Yield the schemes of the groups of four bits."""
    for entry in scheme.entries("config_groups").values():
        weights = lookup(entry, "weights")
        if not isinstance(weights, Mapping) or weights.get("num_bits") != _BITS:
            continue
        group, strategy = weights.get("group_size"), weights.get("strategy")
        packing = lookup(entry, "format") or scheme.get("format")
        whole_row = strategy == "channel"
        weight_only = lookup(entry, "input_activations") is None
        readable = weights.get("type") == "int" and packing == _PACKED and weight_only
        if not readable or not (whole_row or (strategy == "group" and type(group) is int)):
            yield None
            continue
        yield Int4Scheme(
            group=_WHOLE_ROW if whole_row or type(group) is not int else group,
            zero_points=weights.get("symmetric") is False,
            act_order=weights.get("actorder") in _ORDERED,
        )
