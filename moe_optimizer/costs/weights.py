"""Divides a model's weights into parts, and the parts between the devices of a parallel group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_optimizer.specs.expert_formats import row_pitch
from moe_optimizer.specs.model import ModelSpec

FP8_BLOCK = 128
"""Rows and columns that share one FP32 scale in block-wise FP8."""

_FP8_SCALE_BYTES = 4 / FP8_BLOCK**2
_BITS_DIGITS = 3
"""Chosen: bytes are whole numbers, and 8 bits must be 8 for the rate of FP8."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a weight that is not quantised, by dtype."""
# vLLM pads the vocabulary to a multiple of this many rows before it splits it.
_VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """Bytes of a whole model by the way tensor parallelism treats them. The parts add up to the model."""

    experts: int
    """Routed experts: split along their width (TP) or by expert (EP)."""
    linears: int
    """Attention, dense MLP and shared-expert matrices that are split."""
    kv_projections: int
    """Key and value projections: split until every device has one head, then replicated. With latent
    attention its down-projections, which every device has whole."""
    vocabulary: int
    """Input embedding and output head: split along the vocabulary."""
    replicated: int
    """Router and norms: whole on every device."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.experts + self.linears + self.kv_projections + self.vocabulary + self.replicated


def weight_element_bytes(bits: float) -> float:
    """Return the stored bytes of one weight at `bits`: scales of block-wise FP8 are included below 16 bits.

    FP8 stores one FP32 scale per 128x128 block; 16 bits and more store none.
    """
    return bits / 8 + (_FP8_SCALE_BYTES if bits < 16 else 0.0)


def stored_linear_bits(model: ModelSpec) -> float:
    """Return the bits of a weight of the split matrices that are not routed experts, as the checkpoint stores them.

    What `weight_element_bytes` turns into their bytes again. A checkpoint may quantise its experts alone.
    """
    params = model.attention_params + model.dense_params + model.shared_expert_params
    parts = weight_parts(model)
    if not params:
        return 8.0 * DTYPE_BYTES.get(model.dtype, 2)
    bits = 8 * (parts.linears + parts.kv_projections) / params
    return round(bits if bits >= 16 else bits - 8 * _FP8_SCALE_BYTES, _BITS_DIGITS)


def weight_parts(
    model: ModelSpec, *, expert_bits: float | None = None, linear_bits: float | None = None
) -> WeightParts:
    """Divide a model's weight bytes by the way they are split over devices.

    Args:
        model: the whole model.
        expert_bits: bits of one routed-expert weight when they are converted at load time; None: as stored.
        linear_bits: the same for the other split matrices (never for embeddings, router and norms).
    """
    dtype_bytes = DTYPE_BYTES.get(model.dtype, 2)
    vocabulary_params = model.embedding_params + model.lm_head_params
    linear_params = model.attention_params - model.kv_params + model.dense_params + model.shared_expert_params
    # What no field of the ModelSpec names are norms, and in some families projections into an expert latent.
    replicated_params = model.total_params - model.expert_params - vocabulary_params - linear_params - model.kv_params

    # Embeddings, router and norms stay in the model's dtype in the quantised checkpoints that vLLM serves.
    # Where the stored bytes are fewer than that (quantised embeddings), everything shrinks alike.
    other_bytes = model.weight_bytes - model.expert_weight_bytes
    unquantised = (vocabulary_params + replicated_params) * dtype_bytes
    shrink = min(1.0, other_bytes / unquantised) if unquantised else 1.0
    vocabulary = round(vocabulary_params * dtype_bytes * shrink)
    replicated = round(replicated_params * dtype_bytes * shrink)
    matrices = max(0, other_bytes - vocabulary - replicated)
    kv_share = model.kv_params / (model.kv_params + linear_params) if model.kv_params else 0.0
    kv_projections = round(matrices * kv_share)
    linears = matrices - kv_projections

    experts = model.expert_weight_bytes
    if expert_bits is not None:
        experts = round(model.expert_params * weight_element_bytes(expert_bits))
    if linear_bits is not None:
        linears = round(linear_params * weight_element_bytes(linear_bits))
        kv_projections = round(model.kv_params * weight_element_bytes(linear_bits))
    return WeightParts(
        experts=experts,
        linears=linears,
        kv_projections=kv_projections,
        vocabulary=vocabulary,
        replicated=replicated,
    )


def device_weight_bytes(
    model: ModelSpec,
    parts: WeightParts,
    *,
    num_devices: int,
    expert_parallel: bool,
    data_parallel_size: int = 1,
    expert_copies: int = 0,
) -> int:
    """Return the weight bytes of the fullest device when `num_devices` share one copy of the model.

    The devices of all data-parallel copies share the routed experts: each holds a slice of every one, or with EP
    whole ones, of which the fullest device holds ceil((E + copies) / n) of E.
    """
    experts = parts.experts / (num_devices * data_parallel_size)
    if expert_parallel and model.num_experts:
        held = experts_on_device(model, num_devices * data_parallel_size, expert_copies)
        experts = parts.experts * held / model.num_experts
    vocabulary = parts.vocabulary / num_devices
    if model.vocab_size and num_devices > 1:
        row_bytes = parts.vocabulary / model.vocab_size
        padded_rows = math.ceil(model.vocab_size / (_VOCAB_PADDING * num_devices)) * _VOCAB_PADDING
        vocabulary = row_bytes * padded_rows
    kv_projections = parts.kv_projections * kv_head_share(model, num_devices)
    return math.ceil(experts + parts.linears / num_devices + kv_projections + vocabulary + parts.replicated)


def row_filling_bytes(model: ModelSpec) -> int:
    """Return the bytes between the rows of a model's experts in four bits, as our CUDA kernels hold them undivided."""
    up, down = (row_pitch(size // 2) - size // 2 for size in (model.expert_hidden_size, model.moe_intermediate_size))
    each = 2 * model.moe_intermediate_size * up + model.expert_hidden_size * down
    return model.num_moe_layers * model.num_experts * each


def experts_on_device(model: ModelSpec, num_devices: int, expert_copies: int) -> int:
    """Return how many whole experts of a layer the fullest of the devices that share them holds, replicas included."""
    return math.ceil((model.num_experts + expert_copies) / num_devices)


def kv_head_share(model: ModelSpec, num_devices: int) -> float:
    """Return the share of the key/value heads that one of `num_devices` holds, in (0, 1].

    Latent attention caches one vector for all heads: every device holds all of it. Otherwise heads are
    divided, and once there are fewer heads than devices each device holds one whole head.
    """
    attention = model.attention
    if attention.num_kv_heads <= 1 or _caches_latent(model):
        return 1.0
    return max(1, math.ceil(attention.num_kv_heads / num_devices)) / attention.num_kv_heads


def splits_over(
    model: ModelSpec, num_devices: int, *, expert_parallel: bool, data_parallel_size: int = 1
) -> tuple[bool, str]:
    """Return whether vLLM can split this model over `num_devices` by tensor parallelism, and if not, why.

    Without EP the routed experts are sliced over the devices of all data-parallel copies.
    """
    slices = num_devices * data_parallel_size
    if slices == 1:
        return True, ""
    attention = model.attention
    if attention.num_heads % num_devices:
        return False, f"{attention.num_heads} attention heads do not divide by {num_devices}"
    heads = attention.num_kv_heads
    if heads and heads % num_devices and num_devices % heads and not _caches_latent(model):
        return False, f"{heads} key/value heads neither divide by {num_devices} nor divide it"
    if not expert_parallel and model.is_moe and model.moe_intermediate_size % slices:
        return False, f"expert width {model.moe_intermediate_size} does not divide by {slices}"
    return True, ""


def _caches_latent(model: ModelSpec) -> bool:
    # A hybrid model may have latent attention too; its cache is then narrower than its keys alone.
    attention = model.attention
    if attention.kind == "mla" or not attention.num_attention_layers:
        return attention.kind == "mla"
    cached_elements = model.kv_bytes_per_token / 2 / attention.num_attention_layers
    return cached_elements < attention.num_kv_heads * attention.head_dim
