"""Holds how a checkpoint's weights are stored, part by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.specs.expert_formats import MXFP4_GROUP
from moe_optimizer.specs.model import ExpertFormat, Fp8Scales, Int4Scheme

_FOUR = 4
DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}

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
    groups: tuple[Group, ...] = ()
    ignored: ModulePatterns = field(default_factory=lambda: ModulePatterns(()))
    expert_bits: float | None = None
    """Where the file gives the experts a type of their own."""
    mxfp4: bool = False
    """Whether what is stored in 4 bits by the scheme is MXFP4."""
    int4: Int4Scheme | None = None
    """How what is stored in 4 bits by the scheme shares its scales, where that is INT4; None where it is not."""
    scale_bytes_per_weight: float = 0.0
    """Bytes of scales and zero points for each quantised weight."""
    fp8: bool = False
    """Whether the weights are 8-bit floating point."""
    scaled_fp8: bool = False
    """Whether what is stored in 8 bits is FP8 with FP32 scales."""
    weight_block: tuple[int, int] | None = None
    """Rows and columns of the block of weights that shares a scale; None: per tensor, channel or group."""
    fp8_scales: Fp8Scales = ""
    """What shares a scale where all that is stored in 8 bits is FP8 with FP32 scales; "" elsewhere."""
    power_of_two_scales: bool = False
    """Whether the scheme says that its scales are powers of two."""
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
        if bits == {_FOUR} and (self.mxfp4 or self.expert_bits == _FOUR):
            return "mxfp4"
        if bits == {_FOUR} and self.int4 is not None:
            return "int4"
        return "fp8" if bits == {8} and self.scaled_fp8 else "other"

    def stored_bits(self, bits: float) -> float:
        """Return the bits of a weight of so many with its share of the scales and zero points."""
        if bits >= self.dtype_bits:
            return bits
        # A type of four bits that is the experts' alone (DeepSeek-V4) is MXFP4, whatever the scheme of the rest.
        own_type = bits == self.expert_bits == _FOUR
        return bits + 8 * (1 / MXFP4_GROUP if own_type else self.scale_bytes_per_weight)
