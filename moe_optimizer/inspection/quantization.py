"""How a checkpoint's weights are stored: the quantisation method, wherever the model's files say it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.fp8_scales import is_scaled_fp8, weight_block
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.inspection.module_rules import bits_of_type, left_out, patterns_by_bits
from moe_optimizer.specs.model import ExpertFormat

DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}
_DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in DTYPE_BITS}
"""What a configuration may call the dtypes that vLLM computes in."""
_STORED_DTYPES = ("float64", "double", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
"""Further dtypes of torch that a configuration may name; vLLM computes in another instead, and warns."""

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
ATTENTION = (
    "self_attn.q_proj",
    "self_attn.q_b_proj",
    "self_attn.qkv_proj",
    "attn.wq_b",
    "mixer.q_proj",
    "mixer.in_proj",
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_qkvz",
)
EXPERTS = (
    "mlp.experts.0.up_proj",
    "block_sparse_moe.experts.0.w1",
    "feed_forward.experts.0.up_proj",
    "mixer.experts.0.up_proj",
    "ffn.experts.0.w1",
    "experts.0.up_proj",
)
SHARED = (
    "mlp.shared_experts.up_proj",
    "mlp.shared_expert.up_proj",
    "block_sparse_moe.shared_experts.up_proj",
    "mixer.shared_experts.up_proj",
    "ffn.shared_experts.w1",
    "feed_forward.shared_expert.up_proj",
)
DENSE = ("mlp.up_proj", "feed_forward.up_proj", "mixer.up_proj", "ffn.w1")
"""Names under "layers.N." that stand for a whole part when a list of modules is looked up."""


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that are stored with the same number of bits."""

    bits: float
    targets: ModulePatterns | None
    """None: every linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The scheme of a checkpoint."""

    method: str | None
    dtype: str
    groups: tuple[Group, ...]
    ignored: ModulePatterns
    expert_bits: float | None
    """Where the file gives the experts a type of their own."""
    scale_bytes_per_weight: float
    """Bytes of scales for each quantised weight."""
    fp8: bool = False
    """Whether the weights are 8-bit floating point."""
    scaled_fp8: bool = False
    """Whether what is stored in 8 bits is FP8 with FP32 scales."""
    weight_block: tuple[int, int] | None = None
    """Rows and columns of the block of weights that shares a scale; None: per tensor, channel or group."""
    warnings: tuple[str, ...] = ()

    @property
    def dtype_bits(self) -> int:
        """Bits of a weight that is not quantised."""
        return DTYPE_BITS[self.dtype]

    def bits(self, names: tuple[str, ...], layer: int, *, routed: bool = False) -> float:
        """Return the bits of a weight of one part (ATTENTION, EXPERTS, ...) of one layer.

        Args:
            names: module names under the layer that stand for the part.
            layer: index of the layer.
            routed: the part is the routed experts, which may have a type of their own.
        """
        if self.method is None:
            return self.dtype_bits
        full_names = [f"layers.{layer}.{name}" for name in names]
        if self.ignored and any(self.ignored.match(name) for name in full_names):
            return self.dtype_bits
        if routed and self.expert_bits is not None:
            return self.expert_bits
        for group in self.groups:
            if group.targets is None or any(group.targets.match(name) for name in full_names):
                return group.bits
        return self.dtype_bits

    def expert_format(self, layers: Iterable[tuple[tuple[str, ...], int]]) -> ExpertFormat:
        """Return how the routed experts of these layers (the names as in `bits`, the index) are stored."""
        bits = {self.bits(names, layer, routed=True) for names, layer in layers}
        if not bits:
            return "none"
        if bits == {self.dtype_bits}:
            return "dtype"
        return "fp8" if bits == {8} and self.scaled_fp8 else "other"

    def stored_bytes(self, params: int, bits: float) -> float:
        """Return the bytes of `params` weights with their scales."""
        scales = self.scale_bytes_per_weight if bits < self.dtype_bits else 0.0
        return params * (bits / 8 + scales)


def read_quantization(root: Config, config: Config, folder: Path) -> Quantization:
    """Return the scheme from config.json (outer or nested object) or from hf_quant_config.json.

    Raises:
        InputError: a scheme is of the wrong type.
    """
    dtype, warnings = _dtype(root, config)
    scheme = _find_scheme(root, config, folder)
    if scheme is None:
        nothing = ModulePatterns(())
        return Quantization(
            method=None,
            dtype=dtype,
            groups=(),
            ignored=nothing,
            expert_bits=None,
            scale_bytes_per_weight=0.0,
            warnings=tuple(warnings),
        )
    method = _method(scheme)
    groups = _groups(scheme, method)
    if not groups:
        bits = DTYPE_BITS[dtype]
        warnings.append(
            f"{scheme.where.rstrip('.: ')}: the bits of a weight of {method!r} are not known; {bits} assumed"
        )
        groups = (Group(bits, None),)
    special = tuple(Group(bits, ModulePatterns(names)) for bits, names in sorted(patterns_by_bits(scheme).items()))
    groups = (*special, *groups)
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
        expert_bits=bits_of_type(expert_dtype) if expert_dtype else None,
        scale_bytes_per_weight=_scale_bytes(scheme, method, min(group.bits for group in groups)),
        fp8=_is_fp8(scheme, method),
        scaled_fp8=is_scaled_fp8(scheme, method, ALGORITHM_BITS),
        weight_block=weight_block(scheme),
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
    if scheme.get(("quant_algo", "quantization.quant_algo")) is not None:
        return "modelopt"
    if scheme.get("config_groups") is not None:
        return "compressed-tensors"
    if scheme.flag(("load_in_4bit", "_load_in_4bit")) or scheme.flag(("load_in_8bit", "_load_in_8bit")):
        return "bitsandbytes"
    return "unknown"


def _groups(scheme: Config, method: str) -> tuple[Group, ...]:
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


def _is_fp8(scheme: Config, method: str) -> bool:
    """Whether the scheme stores all its weights as 8-bit floating point."""
    if "fp8" in method:
        return True
    algorithm = scheme.get(("quant_algo", "quantization.quant_algo"))
    if isinstance(algorithm, str):
        return algorithm.upper().startswith(("FP8", "MXFP8"))
    named = scheme.get("config_groups")
    if isinstance(named, dict) and named:
        weights = [entry.get("weights") if isinstance(entry, dict) else None for entry in named.values()]
        return all(
            isinstance(each, dict) and (each.get("type"), each.get("num_bits")) == ("float", 8) for each in weights
        )
    types = [scheme.get(name) for name in TYPE_FIELDS]
    return any(isinstance(each, str) and each.lower().startswith(("fp8", "float8")) for each in types)


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


def _ignored(scheme: Config) -> list[object]:
    entries: list[object] = []
    for name in IGNORED_FIELDS:
        value = scheme.get(name)
        if isinstance(value, list):
            entries += value
    return entries + left_out(scheme)


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


def _scale_bytes(scheme: Config, method: str, bits: float) -> float:
    """Return the bytes of scales for each weight, as the method's checkpoints store them."""
    block = weight_block(scheme)
    if block is not None:
        return 4 / (block[0] * block[1])
    if "mxfp4" in method:
        return 1 / 32
    names = ("group_size", "quantization.group_size", "q_group_size", "config_groups.group_0.weights.group_size")
    group = scheme.get(names)
    if type(group) is not int or group <= 0:
        return 0.0
    # NVFP4 has an FP8 scale for each group; GPTQ and AWQ an FP16 scale and a packed zero point.
    return (1 if group == 16 else 2 + bits / 8) / group
