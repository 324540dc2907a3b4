"""Finds and reads a checkpoint's quantisation scheme, wherever the model's files have it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.fp8_scales import fp8_scales, is_fp8, is_mxfp4, is_scaled_fp8, scale_bytes, weight_block
from moe_optimizer.inspection.int4_scheme import int4_scheme
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.inspection.quantization import DTYPE_BITS, Group, Quantization
from moe_optimizer.inspection.scheme_bits import ALGORITHM, IN_4_BITS, bits_of_type, groups_of, special_groups

_DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in DTYPE_BITS}
"""What a configuration may call the dtypes that vLLM computes in."""
_STORED_DTYPES = ("float64", "double", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
"""Further dtypes of torch that a configuration may name; vLLM computes in another instead, and warns."""

IGNORED_FIELDS = (
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "exclude",
    "quantization.exclude_modules",
    "llm_int8_skip_modules",
)
"""Fields that list modules left in the model's own dtype."""


def read_quantization(root: Config, config: Config, folder: Path) -> Quantization:
    """Return the scheme from config.json (outer or nested object) or from hf_quant_config.json.

    Raises:
        InputError: a scheme is of the wrong type.
    """
    dtype, warnings = _dtype(root, config)
    scheme = _find_scheme(root, config, folder)
    if scheme is None:
        return Quantization(method=None, dtype=dtype, warnings=tuple(warnings))
    method = _method(scheme)
    groups = groups_of(scheme, method)
    if not groups:
        bits = DTYPE_BITS[dtype]
        warnings.append(
            f"{scheme.where.rstrip('.: ')}: the bits of a weight of {method!r} are not known; {bits} assumed"
        )
        groups = (Group(bits, None),)
    groups = (*special_groups(scheme), *groups)
    expert_dtype = config.text("expert_dtype", root.text("expert_dtype"))
    ignored = ModulePatterns(_ignored(scheme))
    if ignored.skipped:
        warnings.append(
            f"{scheme.where.rstrip('.: ')}: {len(ignored.skipped)} patterns of its ignore list were not applied"
        )
    return Quantization(
        method=method,
        dtype=dtype,
        groups=groups,
        ignored=ignored,
        expert_bits=bits_of_type(expert_dtype),
        mxfp4=is_mxfp4(scheme, method),
        int4=int4_scheme(scheme, method),
        scale_bytes_per_weight=scale_bytes(scheme, method, min(group.bits for group in groups)),
        fp8=is_fp8(scheme, method),
        scaled_fp8=is_scaled_fp8(scheme, method),
        weight_block=weight_block(scheme),
        fp8_scales=fp8_scales(scheme, method),
        power_of_two_scales=scheme.get("scale_fmt") == "ue8m0",
        warnings=tuple(warnings),
    )


def _dtype(root: Config, config: Config) -> tuple[str, list[str]]:
    """Return the dtype of what is not quantised, BF16 where the file does not say, and warnings."""
    fields = ("dtype", "torch_dtype")
    place = config if config.has(fields) else root
    if not place.has(fields):
        return "bfloat16", []
    text = place.text(fields)
    name = text.removeprefix("torch.")
    if name in _DTYPES:
        return _DTYPES[name], []
    field = place.name_of(fields)
    if name not in _STORED_DTYPES:
        raise place.error(field, text, f"one of {', '.join(sorted(_DTYPES))}")
    return "bfloat16", [f"{place.where}{field}: {name} is not a dtype to compute in; bfloat16 assumed"]


def _find_scheme(root: Config, config: Config, folder: Path) -> Config | None:
    for place in (root, config):
        for name in ("quantization_config", "compression_config"):
            scheme = place.sub(name)
            if scheme is not None and scheme.raw:
                return scheme
    # Not is_file: a pipe, a folder or a broken link under this name is refused, as it is under config.json.
    if os.path.lexists(folder / "hf_quant_config.json"):
        raw = read_json_object(folder / "hf_quant_config.json")
        scheme = Config(raw, where="hf_quant_config.json: ")
        inner = scheme.sub("quantization")
        if inner is not None and inner.text("quant_algo"):
            return scheme
    return None


def _method(scheme: Config) -> str:
    method = scheme.text("quant_method").lower().replace("compressed_tensors", "compressed-tensors")
    if method:
        return method
    producer = scheme.sub("producer")
    if producer is not None and producer.text("name"):
        return producer.text("name").lower()
    if scheme.get(ALGORITHM) is not None:
        return "modelopt"
    if scheme.get("config_groups") is not None:
        return "compressed-tensors"
    if scheme.flag(IN_4_BITS) or scheme.flag(("load_in_8bit", "_load_in_8bit")):
        return "bitsandbytes"
    return "unknown"


def _ignored(scheme: Config) -> list[object]:
    lists = [scheme.items(name) or [] for name in IGNORED_FIELDS]
    # GPTQModel's negative rules.
    left_out = [f"re:{key[2:]}" for key in scheme.entries("dynamic") if key.startswith("-:")]
    return [*itertools.chain(*lists), *left_out]
