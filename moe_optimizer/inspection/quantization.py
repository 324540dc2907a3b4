"""How a checkpoint's weights are stored: the quantisation method, wherever the model's files say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.json_file import read_json_object

DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}

METHOD_BITS: Mapping[str, float] = {
    "fp8": 8,
    "fbgemm_fp8": 8,
    "ptpc_fp8": 8,
    "mxfp8": 8,
    "mxfp4": 4,
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

BITS_FIELDS = ("bits", "w_bit", "weight_bits", "num_bits", "nbits", "wbits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The scheme of a checkpoint."""

    method: str | None
    expert_bits: float
    linear_bits: float
    """Bits of a weight of the linear layers outside the routed experts."""
    dtype: str
    scale_bytes_per_weight: float
    """Bytes of scales for each quantised weight."""
    warnings: tuple[str, ...] = ()


def read_quantization(root: Config, config: Config, folder: Path) -> Quantization:
    """Return the scheme from config.json (outer or nested object) or from hf_quant_config.json.

    Raises:
        InputError: a scheme is of the wrong type.
    """
    dtype = _dtype(root, config)
    full = DTYPE_BITS[dtype]
    scheme = _find_scheme(root, config, folder)
    if scheme is None:
        return Quantization(method=None, expert_bits=full, linear_bits=full, dtype=dtype, scale_bytes_per_weight=0.0)
    method = _method(scheme)
    bits = _bits(scheme, method)
    warnings: list[str] = []
    if bits is None:
        warnings.append(f"{scheme.where[:-1]}: the bits of a weight are not known for {method!r}; {full} assumed")
        bits = full
    expert_bits = bits
    expert_dtype = config.text("expert_dtype", root.text("expert_dtype"))
    if expert_dtype:
        expert_bits = _dtype_bits(expert_dtype) or bits
    return Quantization(
        method=method,
        expert_bits=expert_bits,
        linear_bits=bits,
        dtype=dtype,
        scale_bytes_per_weight=_scale_bytes(scheme, method, bits),
        warnings=tuple(warnings),
    )


def _dtype(root: Config, config: Config) -> str:
    name = config.get(("dtype", "torch_dtype")) or root.get(("dtype", "torch_dtype"))
    text = str(name).removeprefix("torch.") if isinstance(name, str) else ""
    return text if text in DTYPE_BITS else "bfloat16"


def _find_scheme(root: Config, config: Config, folder: Path) -> Config | None:
    for place in (root, config):
        for name in ("quantization_config", "compression_config"):
            scheme = place.sub(name)
            if scheme is not None and scheme.raw:
                return scheme
    if (folder / "hf_quant_config.json").is_file():
        raw = read_json_object(folder / "hf_quant_config.json")
        scheme = Config(raw, where="hf_quant_config.json: ")
        inner = scheme.sub("quantization")
        if inner is not None and inner.get("quant_algo") is not None:
            return scheme
    return None


def _method(scheme: Config) -> str:
    method = scheme.text("quant_method").lower().replace("compressed_tensors", "compressed-tensors")
    if method:
        return method
    producer = scheme.sub("producer")
    if producer is not None and producer.text("name"):
        return producer.text("name").lower()
    if scheme.get("config_groups") is not None:
        return "compressed-tensors"
    if scheme.get("quantization.quant_algo") is not None or scheme.get("quant_algo") is not None:
        return "modelopt"
    if scheme.flag(("load_in_4bit", "_load_in_4bit")) or scheme.flag(("load_in_8bit", "_load_in_8bit")):
        return "bitsandbytes"
    return "unknown"


def _bits(scheme: Config, method: str) -> float | None:
    algorithm = scheme.get(("quant_algo", "quantization.quant_algo"))
    if isinstance(algorithm, str) and algorithm.upper() in ALGORITHM_BITS:
        return ALGORITHM_BITS[algorithm.upper()]
    for name in (*BITS_FIELDS, *(f"weights.{name}" for name in BITS_FIELDS)):
        if scheme.get(name) is not None:
            return scheme.number(name, 0.0)
    group_bits = [bits for group in _groups(scheme) if (bits := _group_bits(group)) is not None]
    if group_bits:
        return min(group_bits)
    if method == "bitsandbytes":
        return 4 if scheme.flag(("load_in_4bit", "_load_in_4bit")) else 8
    layers = scheme.get(("quantized_layers", "quantization.quantized_layers"))
    if isinstance(layers, dict):
        algorithms = {str(entry.get("quant_algo")).upper() for entry in layers.values() if isinstance(entry, dict)}
        known = [ALGORITHM_BITS[name] for name in algorithms if name in ALGORITHM_BITS]
        if known:
            return min(known)
    return METHOD_BITS.get(method)


def _groups(scheme: Config) -> list[object]:
    groups = scheme.get("config_groups")
    return list(groups.values()) if isinstance(groups, dict) else []


def _group_bits(group: object) -> float | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    return bits if isinstance(bits, (int, float)) and 0 < bits <= 32 else None


def _dtype_bits(name: str) -> float | None:
    match = re.search(r"(\d+)", name)
    return float(match.group(1)) if match and 1 <= int(match.group(1)) <= 64 else None


def _scale_bytes(scheme: Config, method: str, bits: float) -> float:
    """Return the bytes of scales for each weight, as the method's checkpoints store them."""
    block = scheme.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block):
        return 4 / (block[0] * block[1])
    if method == "mxfp4":
        return 1 / 32
    group = scheme.get(("group_size", "quantization.group_size", "q_group_size"))
    if isinstance(group, int) and group > 0:
        return (1 if bits == 4 and method.startswith(("modelopt", "nvfp4")) else 2.5) / group
    return 0.0
