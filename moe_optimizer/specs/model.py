"""Holds what a model is: counts and shapes read from its configuration and weight headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["mha", "gqa", "mla", "hybrid", "none"]
Fp8Scales = Literal["", "block", "channel", "tensor"]
ExpertFormat = Literal["none", "dtype", "fp8", "mxfp4", "int4", "other"]


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """How experts of four-bit integers share their scales, whatever method's files they are in."""

    group: int
    """Neighbouring columns that share a scale; -1: a whole row does."""
    zero_points: bool
    """Whether each group has one; else all are 8."""
    act_order: bool
    """Whether the columns of a group lie anywhere in the row, in an order that the file has beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of the decoder layers."""

    kind: AttentionKind
    """mha: as many key/value heads as query heads; gqa: fewer; mla: a compressed latent is cached;
    hybrid: some layers are not attention but recurrent (state space, linear attention, convolution), or have both
    side by side; none: no layer is attention."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of one query/key head, in elements. For mla: the decompressed query/key head."""
    sliding_window: int | None
    """Tokens that a windowed layer keeps; None when no layer is windowed."""
    num_attention_layers: int
    """Layers that keep a key/value cache growing with the sequence (windowed layers included)."""
    num_windowed_layers: int
    has_head_norms: bool
    """Whether queries and keys are normalised, with one weight vector for all query heads and one for all key heads."""
    chunked: bool = False
    """Whether the configuration has chunks of attention (Llama 4), for which vLLM keeps windowed layers whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A causal language model as far as planning needs it.

    Counts are exact where the configuration determines them; vision and audio towers are counted in
    total_params only when safetensors headers are present, and `warnings` says when they are left out.
    """

    name: str
    """What the user named: a hub id or a folder's last component."""
    path: str
    """What vLLM is given: the folder that holds config.json, or a hub id whose weights are not in the cache."""
    architecture: str
    """First entry of config.json's `architectures`; "" when the file names none."""
    model_type: str
    is_moe: bool
    num_experts: int
    """Routed experts in each MoE layer, zero (identity) experts not counted; 0 for a dense model."""
    top_k: int
    """Routed experts that one token uses; 0 for a dense model."""
    num_shared_experts: int
    """Experts in each MoE layer that every token uses."""
    moe_intermediate_size: int
    """Width I of one routed expert, in elements; 0 for a dense model."""
    expert_hidden_size: int
    """Input width of one routed expert: hidden_size unless the experts read a latent; 0 for a dense model."""
    expert_matrices: int
    """Weight matrices of one expert: 3 gated (gate, up, down), 2 not gated (up, down); 0 for a dense model."""
    expert_activation: str
    """The config's activation name of the experts, for example "silu"; "" for a dense model."""
    expert_has_bias: bool
    hidden_size: int
    num_layers: int
    """Decoder layers, multi-token-prediction layers not counted."""
    moe_layers: tuple[int, ...]
    """Indices of the layers with routed experts."""
    vocab_size: int
    total_params: int
    """Parameters of the language model as served, multi-token-prediction layers left out."""
    active_params: int
    """Parameters that one token uses: total_params less the routed experts it is not sent to; embeddings included."""
    expert_params: int
    """Parameters of all routed experts of all layers together."""
    embedding_params: int
    """Input embedding tables (token and learned position tables)."""
    lm_head_params: int
    """The output matrix; 0 when it is the input embedding."""
    attention_params: int
    """All token mixers (attention, recurrent and convolution layers) with their biases and inner norms."""
    kv_params: int
    """The part of attention_params that makes keys and values. Tensor parallelism over more devices than
    key/value heads copies it instead of splitting it further."""
    dense_params: int
    """Feed-forward parts that every token uses, shared experts not counted."""
    shared_expert_params: int
    """Shared experts and their gates."""
    router_params: int
    """Routers: gate weights and biases. Kept whole on every device."""
    quant_method: str | None
    """As the checkpoint names it ("fp8", "gptq", "mxfp4", "modelopt", ...); None when not quantised."""
    weight_bits: float
    """Bits of one weight of the quantised part (of every weight when not quantised): below 8 with its share of scales
    and zero points (4.25 for MXFP4), from 8 on without.
    """
    weights_are_fp8: bool
    """Whether the quantised weights are 8-bit floating point, in whatever method's files (fp8, compressed-tensors,
    modelopt, ...)."""
    weight_block: tuple[int, int] | None
    """Rows and columns of the block of quantised weights that shares a scale; None: per tensor, channel or group, or
    not quantised."""
    fp8_scales: Fp8Scales = ""
    """What shares a scale in a checkpoint whose weights are FP8 with FP32 scales; "" for every other."""
    power_of_two_scales: bool = False
    """Whether the checkpoint says that its scales are powers of two, for activations too (scale_fmt ue8m0)."""
    expert_format: ExpertFormat
    """How the routed experts of every MoE layer are stored, in whatever method's files. dtype: not quantised; fp8: in
    FP8 with FP32 scales, of `weight_block` or else of tensors or channels; mxfp4: codes of four bits, a power of two
    for each 32; int4: integers of four bits as `int4` says; other: in another way, or not all alike; none: a dense
    model."""
    int4: Int4Scheme | None = None
    """How they share their scales, where `expert_format` is int4."""
    weight_bytes: int
    """Bytes of all weights as stored in the checkpoint, scales included; exact with safetensors headers."""
    expert_weight_bytes: int
    """The routed experts' share of `weight_bytes`."""
    dtype: str
    """The dtype of the parts that are not quantised: "bfloat16", "float16" or "float32"."""
    attention: AttentionSpec
    kv_bytes_per_token: int
    """Cache bytes that one more token costs on all layers together, at 2 bytes an element (windowed layers
    included as if the window were not yet full), before any tensor-parallel split."""
    state_bytes_per_sequence: int
    """Fixed-size state of recurrent and convolution layers for one sequence, at 2 bytes an element."""
    max_position: int
    """Longest position the configuration states, in tokens; 0 when it does not say."""
    max_model_len: int
    """Longest sequence vLLM accepts, in tokens: the stated length times the factor of RoPE scaling where that is
    not in it; 0 when the configuration states none."""
    mtp_layers: int = 0
    """Layers that draft the tokens after the next one (multi-token prediction), as the configuration states them; 1
    where only the weight files show them."""
    mtp_weight_bytes: int | None = None
    """Bytes of those layers in the checkpoint; 0: it was saved without them. None: there are no headers to tell."""
    needs_remote_code: bool
    """vLLM loads this model only with code of the model's own (auto_map): it has no class for it, or neither vLLM nor
    transformers has one for its configuration."""
    servable: bool | None
    """Whether the installed (or targeted) vLLM has the architecture; None when that cannot be told."""
    servable_reason: str
    warnings: tuple[str, ...]

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return len(self.moe_layers)
