"""Adds up a decoder's shapes into a ModelSpec."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moe_optimizer.inspection.checkpoint import Stored, compare
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.quantization import ATTENTION, DENSE, EXPERTS, SHARED, Quantization
from moe_optimizer.inspection.safetensors_header import Tensor
from moe_optimizer.inspection.shapes import Decoder, Mixer
from moe_optimizer.specs.model import AttentionKind, AttentionSpec, ModelSpec

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
)
MAX_POSITION = (*_LENGTHS, "max_position_embedding", "max_context", "n_ctx")
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of vLLM's multi-token-prediction models."""
_SCALES_COUNT_BELOW = 8
"""Bits of a weight: FP8 and INT8 have a scale for a hundred weights and more."""
_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE scaling whose stated length includes the factor."""


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
    mixers = [layer.mixer for layer in layers]
    moe = [(i, layer.experts) for i, layer in enumerate(layers) if layer.experts is not None]
    experts = [entry for _, entry in moe]
    widest = max(experts, key=lambda entry: (entry.num_experts, entry.intermediate_size), default=None)
    attention_experts = sum(mixer.expert_params for mixer in mixers)
    idle = decoder.idle_params + sum(mixer.idle_params for mixer in mixers)
    idle += sum(max(entry.num_experts - entry.top_k, 0) * entry.expert_params for entry in experts)
    stored = _described(decoder, quantization)
    if tensors is not None:
        stored = compare(tensors, decoder, stored, exact=exact)
    max_position = config.integer(MAX_POSITION, 0) or 0
    expert_format = quantization.expert_format((entry.modules or EXPERTS, i) for i, entry in moe)
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
        active_params=stored.total_params - idle,
        expert_params=attention_experts + sum(entry.routed_params for entry in experts),
        embedding_params=decoder.embedding_params,
        lm_head_params=decoder.lm_head_params,
        attention_params=sum(mixer.params for mixer in mixers) - attention_experts,
        kv_params=sum(mixer.kv_params for mixer in mixers),
        dense_params=sum(layer.dense_params for layer in layers),
        shared_expert_params=sum(entry.shared_params for entry in experts),
        router_params=sum(entry.router_params for entry in experts),
        quant_method=quantization.method,
        weight_bits=_weight_bits(decoder, quantization),
        weights_are_fp8=quantization.fp8,
        weight_block=quantization.weight_block,
        fp8_scales=quantization.fp8_scales,
        power_of_two_scales=quantization.power_of_two_scales,
        expert_format=expert_format,
        int4=quantization.int4 if expert_format == "int4" else None,
        weight_bytes=stored.weight_bytes,
        expert_weight_bytes=stored.expert_weight_bytes,
        dtype=quantization.dtype,
        attention=_attention(mixers, chunked=config.integer("attention_chunk_size") is not None),
        kv_bytes_per_token=2 * sum(mixer.cache_elements for mixer in mixers),
        state_bytes_per_sequence=2 * sum(mixer.state_elements for mixer in mixers),
        max_position=max_position,
        max_model_len=_longest_sequence(config, model_type, max_position),
        mtp_layers=max(config.integer(name, 0) or 0 for name in _MTP_LAYERS) or int(bool(stored.mtp_weight_bytes)),
        mtp_weight_bytes=stored.mtp_weight_bytes,
        needs_remote_code=needs_remote_code,
        servable=servable[0],
        servable_reason=servable[1],
        warnings=(*warnings, *decoder.warnings, *quantization.warnings, *stored.warnings),
    )


def _described(decoder: Decoder, quantization: Quantization) -> Stored:
    """Return the size that the configuration describes, as the scheme stores each part of each layer."""
    experts, linears, linear_params = 0.0, 0.0, 0
    for i, layer in enumerate(decoder.layers):
        moe = layer.experts
        routed = moe.routed_params if moe else 0
        attention_experts = layer.mixer.expert_params
        parts: list[tuple[int, tuple[str, ...]]]
        parts = [(layer.mixer.params - attention_experts, ATTENTION), (layer.dense_params, DENSE)]
        if attention_experts:
            experts += attention_experts * quantization.stored_bits(quantization.bits(ATTENTION, i, routed=True)) / 8
        if moe:
            bits = quantization.bits(moe.modules or EXPERTS, i, routed=True)
            experts += routed * quantization.stored_bits(bits) / 8
            parts.append((moe.shared_params + moe.latent_params, SHARED))
        for params, names in parts:
            if params:
                linears += params * quantization.stored_bits(quantization.bits(names, i)) / 8
        linear_params += routed + attention_experts + sum(params for params, _ in parts)
    total = decoder.total_params
    rest = (total - linear_params) * quantization.dtype_bits / 8
    return Stored(total_params=total, weight_bytes=round(experts + linears + rest), expert_weight_bytes=round(experts))


def _weight_bits(decoder: Decoder, quantization: Quantization) -> float:
    """Return the bits of the routed experts, or where those are not quantised or absent, of the part that is; below 8
    with the share of scales and zero points.
    """
    bits = [
        quantization.bits(layer.experts.modules or EXPERTS, i, routed=True)
        for i, layer in enumerate(decoder.layers)
        if layer.experts
    ]
    bits += [quantization.bits(names, i) for i in range(len(decoder.layers)) for names in (DENSE, ATTENTION)]
    quantised = next((entry for entry in bits if entry < quantization.dtype_bits), quantization.dtype_bits)
    return quantization.stored_bits(quantised) if quantised < _SCALES_COUNT_BELOW else quantised


def _attention(mixers: list[Mixer], *, chunked: bool) -> AttentionSpec:
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
        has_head_norms=described is not None and described.has_head_norms,
        chunked=chunked,
    )


def _kind(mixers: list[Mixer], described: Mixer | None) -> AttentionKind:
    if described is None:
        return "none"
    if any(mixer.kind == "state" or mixer.state_elements for mixer in mixers):
        return "hybrid"
    if described.kind == "mla":
        return "mla"
    return "mha" if described.num_kv_heads == described.num_heads else "gqa"


def _longest_sequence(config: Config, model_type: str, max_position: int) -> int:
    """Return the longest sequence that vLLM accepts: the stated length times its RoPE scaling; 0 without a length.

    Args:
        config: the language model's object.
        model_type: of that object.
        max_position: the length read from any field, used where none of vLLM's is there.

    Raises:
        InputError: a length is not an integer, or the scaling is no object with a number.
    """
    # vLLM reads these fields; the smallest counts.
    stated = [length for name in (*_LENGTHS, "seq_len") if (length := config.integer(name, 0))]
    length = config.integer("model_max_length", 0) or min(stated, default=max_position)
    # Gemma 3 states the scaled length beside a factor.
    return length if "gemma3" in model_type else int(length * _factor(config))


def _factor(config: Config) -> float:
    factor: float = 1.0
    for name, rope in _rope_parameters(config):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        value = rope.get("factor")
        if isinstance(value, (str, list, dict)):
            raise config.error(f"{name}.factor", value, "a number")
        if kind in _ALREADY_SCALED or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        factor = value if 0 < value < math.inf else factor
    return factor


def _rope_parameters(config: Config) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the parameters of each kind of layer, and the field they are in; most models have one kind."""
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        if isinstance(entry, (str, list)):
            raise config.error(name, entry, "an object")
        if isinstance(entry, Mapping) and entry:
            nested = [value for value in entry.values() if isinstance(value, Mapping)]
            yield from ((name, each) for each in (nested if len(nested) == len(entry) else [entry]))
            return
