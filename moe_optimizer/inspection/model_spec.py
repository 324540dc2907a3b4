"""Adds up a decoder's shapes into a ModelSpec."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.inspection.checkpoint import compare
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.longest_sequence import longest_sequence
from moe_optimizer.inspection.param_counts import count_params
from moe_optimizer.inspection.quantization import ATTENTION, DENSE, EXPERTS, SHARED, Quantization
from moe_optimizer.inspection.safetensors_header import Tensor
from moe_optimizer.inspection.shapes import Decoder, Mixer
from moe_optimizer.specs.model import AttentionKind, AttentionSpec, ModelSpec

MAX_POSITION = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
    "max_position_embedding",
    "max_context",
    "n_ctx",
)


def build_spec(
    *,
    name: str,
    path: str,
    architecture: str,
    model_type: str,
    config: Config,
    decoder: Decoder,
    quantization: Quantization,
    servable: tuple[bool | None, str],
    tensors: tuple[Tensor, ...] | None,
    needs_remote_code: bool,
    exact: bool,
    warnings: tuple[str, ...],
) -> ModelSpec:
    """Return the sums over a decoder's layers, with how and where it is stored."""
    layers = decoder.layers
    moe = [(i, layer.experts) for i, layer in enumerate(layers) if layer.experts is not None]
    experts = [entry for _, entry in moe]
    widest = max(experts, key=lambda entry: (entry.num_experts, entry.intermediate_size), default=None)
    params = count_params(decoder)
    stored = _stored(decoder, params.total, quantization, tensors, exact=exact)
    max_position = config.integer(MAX_POSITION, 0) or 0
    return ModelSpec(
        name=name,
        path=path,
        architecture=architecture,
        model_type=model_type,
        is_moe=bool(moe),
        num_experts=widest.num_experts if widest else 0,
        top_k=max((entry.top_k for entry in experts), default=0),
        num_shared_experts=max((entry.num_shared_experts for entry in experts), default=0),
        moe_intermediate_size=widest.intermediate_size if widest else 0,
        expert_hidden_size=widest.hidden_size if widest else 0,
        expert_matrices=widest.matrices if widest else 0,
        expert_activation=decoder.expert_activation,
        expert_has_bias=decoder.expert_has_bias,
        hidden_size=decoder.hidden_size,
        num_layers=len(layers),
        moe_layers=tuple(i for i, _ in moe),
        vocab_size=decoder.vocab_size,
        total_params=stored.total_params,
        active_params=stored.total_params - params.idle,
        expert_params=params.experts,
        embedding_params=params.embedding,
        lm_head_params=params.lm_head,
        attention_params=params.attention,
        kv_params=params.kv,
        dense_params=params.dense,
        shared_expert_params=params.shared_experts,
        router_params=params.routers,
        quant_method=quantization.method,
        weight_bits=_weight_bits(decoder, quantization),
        weights_are_fp8=quantization.fp8,
        weight_block=quantization.weight_block,
        expert_format=quantization.expert_format((entry.modules or EXPERTS, i) for i, entry in moe),
        weight_bytes=stored.weight_bytes,
        expert_weight_bytes=stored.expert_weight_bytes,
        dtype=quantization.dtype,
        attention=_attention([layer.mixer for layer in layers]),
        kv_bytes_per_token=2 * sum(layer.mixer.cache_elements for layer in layers),
        state_bytes_per_sequence=2 * sum(layer.mixer.state_elements for layer in layers),
        max_position=max_position,
        max_model_len=longest_sequence(config, model_type, max_position),
        needs_remote_code=needs_remote_code,
        servable=servable[0],
        servable_reason=servable[1],
        warnings=(*warnings, *decoder.warnings, *quantization.warnings, *stored.warnings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A model's size: as its checkpoint's headers have it, else as its configuration describes it."""

    total_params: int
    """Vision and audio towers of the checkpoint included."""
    weight_bytes: int
    expert_weight_bytes: int
    """The part of `weight_bytes` that is routed experts."""
    warnings: tuple[str, ...] = ()


def _stored(
    decoder: Decoder, params: int, quantization: Quantization, tensors: tuple[Tensor, ...] | None, *, exact: bool
) -> _Stored:
    """Return the size of a decoder of `params` parameters; see `compare` for `tensors` and `exact`."""
    expert_bytes, weight_bytes = _stored_bytes(decoder, params, quantization)
    if tensors is None:
        return _Stored(total_params=params, weight_bytes=weight_bytes, expert_weight_bytes=expert_bytes)
    checkpoint = compare(tensors, decoder, params, exact=exact)
    language_params = params if checkpoint.language_params is None else checkpoint.language_params
    return _Stored(
        total_params=language_params + checkpoint.tower_params,
        weight_bytes=weight_bytes if checkpoint.incomplete else checkpoint.weight_bytes,
        expert_weight_bytes=expert_bytes if checkpoint.incomplete else checkpoint.expert_weight_bytes,
        warnings=checkpoint.warnings,
    )


def _stored_bytes(decoder: Decoder, total: int, quantization: Quantization) -> tuple[int, int]:
    """Return the bytes of the routed experts and of everything, as the scheme stores each part of each layer."""
    experts, linears, linear_params = 0.0, 0.0, 0
    for i, layer in enumerate(decoder.layers):
        moe = layer.experts
        routed = moe.num_experts * moe.expert_params if moe else 0
        attention_experts = layer.mixer.expert_params
        parts = [(layer.mixer.params - attention_experts, ATTENTION), (layer.dense_params, DENSE)]
        if attention_experts:
            experts += quantization.stored_bytes(attention_experts, quantization.bits(ATTENTION, i, routed=True))
        if moe:
            experts += quantization.stored_bytes(routed, quantization.bits(moe.modules or EXPERTS, i, routed=True))
            parts.append((moe.shared_params + moe.latent_params, SHARED))
        for params, names in parts:
            if params:
                linears += quantization.stored_bytes(params, quantization.bits(names, i))
        linear_params += routed + attention_experts + sum(params for params, _ in parts)
    rest = (total - linear_params) * quantization.dtype_bits / 8
    return round(experts), round(experts + linears + rest)


def _weight_bits(decoder: Decoder, quantization: Quantization) -> float:
    """Return the bits of the routed experts, or where those are not quantised or absent, of the part that is."""
    bits = [
        quantization.bits(layer.experts.modules or EXPERTS, i, routed=True)
        for i, layer in enumerate(decoder.layers)
        if layer.experts
    ]
    bits += [quantization.bits(names, i) for i in range(len(decoder.layers)) for names in (DENSE, ATTENTION)]
    quantised = (entry for entry in bits if entry < quantization.dtype_bits)
    return next(quantised, quantization.dtype_bits)


def _attention(mixers: list[Mixer]) -> AttentionSpec:
    caching = [mixer for mixer in mixers if mixer.kind in ("attention", "mla")]
    windows = [mixer.window for mixer in caching if mixer.window]
    # Layers of a kind are alike; where kinds differ (windowed beside full), the full ones are described.
    described = next((mixer for mixer in caching if not mixer.window), caching[0] if caching else None)
    return AttentionSpec(
        kind=_kind(mixers, described),
        num_heads=described.num_heads if described else 0,
        num_kv_heads=described.num_kv_heads if described else 0,
        head_dim=described.head_dim if described else 0,
        sliding_window=max(windows, default=None),
        num_attention_layers=len(caching),
        num_windowed_layers=len(windows),
    )


def _kind(mixers: list[Mixer], described: Mixer | None) -> AttentionKind:
    if described is None:
        return "none"
    if any(mixer.kind == "state" or mixer.state_elements for mixer in mixers):
        return "hybrid"
    if described.kind == "mla":
        return "mla"
    return "mha" if described.num_kv_heads == described.num_heads else "gqa"
