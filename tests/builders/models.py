"""Models to plan for."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.specs.model import AttentionKind, AttentionSpec, Int4Scheme, ModelSpec

_TINY_MOE = Path(__file__).parents[2] / "examples" / "tiny-moe"


def shaped_model(
    *,
    name: str = "shaped-moe",
    hidden: int = 2048,
    layers: int = 48,
    heads: int = 32,
    kv_heads: int = 4,
    head_dim: int = 128,
    vocab: int = 151936,
    experts: int = 128,
    top_k: int = 8,
    width: int = 768,
    dense_layers: int = 0,
    dense_width: int = 6144,
    shared: int = 0,
    kind: AttentionKind = "gqa",
    window: int | None = None,
    windowed_layers: int = 0,
    head_norms: bool = False,
    attention_params_per_layer: int | None = None,
    kv_params_per_layer: int | None = None,
    kv_elements_per_layer: int | None = None,
    expert_bytes_per_weight: float = 2.0,
    linear_bytes_per_weight: float = 2.0,
    **changes: Any,
) -> ModelSpec:
    """Return a ModelSpec whose counts follow from its shape; experts 0 gives a dense model."""
    moe = layers - dense_layers if experts else 0
    kv_elements = 2 * kv_heads * head_dim if kv_elements_per_layer is None else kv_elements_per_layer
    kv_params = hidden * kv_elements if kv_params_per_layer is None else kv_params_per_layer
    attention = 2 * hidden * heads * head_dim + kv_params
    attention = attention if attention_params_per_layer is None else attention_params_per_layer
    expert = moe * experts * 3 * hidden * width
    shared_params = moe * shared * 3 * hidden * width
    dense = (layers - moe) * 3 * hidden * dense_width
    router = moe * experts * hidden
    linear = layers * attention + shared_params + dense
    other = 2 * vocab * hidden + router + (2 * layers + 1) * hidden
    total = expert + linear + other
    expert_bytes = round(expert * expert_bytes_per_weight)
    fields: dict[str, Any] = {
        "name": name,
        "path": f"/models/{name}",
        "architecture": "Qwen3MoeForCausalLM",
        "model_type": "qwen3_moe",
        "is_moe": experts > 0,
        "num_experts": experts,
        "top_k": top_k if experts else 0,
        "num_shared_experts": shared,
        "moe_intermediate_size": width if experts else 0,
        "expert_hidden_size": hidden if experts else 0,
        "expert_matrices": 3 if experts else 0,
        "expert_activation": "silu" if experts else "",
        "expert_has_bias": False,
        "hidden_size": hidden,
        "num_layers": layers,
        "moe_layers": tuple(range(dense_layers, layers)) if experts else (),
        "vocab_size": vocab,
        "total_params": total,
        "active_params": total - (expert - expert // experts * top_k if experts else 0),
        "expert_params": expert,
        "embedding_params": vocab * hidden,
        "lm_head_params": vocab * hidden,
        "attention_params": layers * attention,
        "kv_params": layers * kv_params,
        "dense_params": dense,
        "shared_expert_params": shared_params,
        "router_params": router,
        "quant_method": None,
        "weight_bits": 16.0,
        "weights_are_fp8": "fp8" in (changes.get("quant_method") or ""),
        "weight_block": None,
        "expert_format": _expert_format(changes.get("quant_method"), experts),
        "weight_bytes": expert_bytes + round(linear * linear_bytes_per_weight) + 2 * other,
        "expert_weight_bytes": expert_bytes,
        "dtype": "bfloat16",
        "attention": AttentionSpec(
            kind=kind,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            sliding_window=window,
            num_attention_layers=layers,
            num_windowed_layers=windowed_layers,
            has_head_norms=head_norms,
        ),
        "kv_bytes_per_token": layers * kv_elements * 2,
        "state_bytes_per_sequence": 0,
        "max_position": 40960,
        "needs_remote_code": False,
        "servable": True,
        "servable_reason": "",
        "warnings": (),
    }
    fields |= changes
    return ModelSpec(**({"max_model_len": fields["max_position"]} | fields))


def _expert_format(method: str | None, experts: int) -> str:
    if not experts:
        return "none"
    return {None: "dtype", "fp8": "fp8", "mxfp4": "mxfp4"}.get(method, "other")


def qwen3_30b_a3b(name: str = "Qwen3-30B-A3B", **changes: Any) -> ModelSpec:
    return shaped_model(name=name, head_norms=True, **changes)


def qwen3_30b_a3b_fp8() -> ModelSpec:
    return qwen3_30b_a3b(
        name="Qwen3-30B-A3B-FP8",
        quant_method="fp8",
        weight_bits=8.0,
        weight_block=(128, 128),
        fp8_scales="block",
        expert_bytes_per_weight=1 + 4 / 128**2,
        linear_bytes_per_weight=1 + 4 / 128**2,
    )


def qwen3_30b_a3b_int4(**changes: Any) -> ModelSpec:
    """As the published GPTQ checkpoint: its files have zero points, all 8."""
    bytes_per_weight = (4 + (16 + 4) / 128) / 8
    fields: dict[str, Any] = {
        "quant_method": "gptq",
        "weight_bits": 8 * bytes_per_weight,
        "expert_format": "int4",
        "int4": Int4Scheme(group=128, zero_points=False, act_order=False),
        "expert_bytes_per_weight": bytes_per_weight,
        "linear_bytes_per_weight": bytes_per_weight,
    }
    return qwen3_30b_a3b(name="Qwen3-30B-A3B-GPTQ-Int4", **(fields | changes))


def mixtral_8x7b() -> ModelSpec:
    return shaped_model(
        name="Mixtral-8x7B-v0.1",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        vocab=32000,
        experts=8,
        top_k=2,
        width=14336,
        max_position=32768,
    )


def deepseek_v3(*, bytes_per_weight: float = 1 + 4 / 128**2, **changes: Any) -> ModelSpec:
    """Return the model as published, in FP8 with a scale per block, unless told otherwise."""
    latent = 7168 * 1536 + 7168 * 576
    shape: dict[str, Any] = {
        "name": "DeepSeek-V3",
        "architecture": "DeepseekV3ForCausalLM",
        "model_type": "deepseek_v3",
        "hidden": 7168,
        "layers": 61,
        "heads": 128,
        "kv_heads": 128,
        "head_dim": 192,
        "kind": "mla",
        "vocab": 129280,
        "experts": 256,
        "top_k": 8,
        "width": 2048,
        "dense_layers": 3,
        "dense_width": 18432,
        "shared": 1,
        "attention_params_per_layer": latent + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
        "kv_params_per_layer": latent,
        "kv_elements_per_layer": 576,
        "max_position": 163840,
        "quant_method": "fp8",
        "weight_bits": 8.0,
        "weight_block": (128, 128),
        "fp8_scales": "block",
        "expert_bytes_per_weight": bytes_per_weight,
        "linear_bytes_per_weight": bytes_per_weight,
    }
    return shaped_model(**(shape | changes))


def gpt_oss_120b(name: str = "gpt-oss-120b", *, layers: int = 36, experts: int = 128) -> ModelSpec:
    return shaped_model(
        name=name,
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        hidden=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
        experts=experts,
        top_k=4,
        width=2880,
        window=128,
        windowed_layers=layers // 2,
        max_position=131072,
        expert_has_bias=True,
        quant_method="mxfp4",
        weight_bits=4.25,
        expert_bytes_per_weight=4.25 / 8,
    )


def gpt_oss_20b() -> ModelSpec:
    return gpt_oss_120b("gpt-oss-20b", layers=24, experts=32)


def tiny_moe(**changes: Any) -> ModelSpec:
    """Return the bundled model as the inspector reads it, at a path that is the same on every machine."""
    facts: dict[str, Any] = {"path": "/models/tiny-moe", "servable": True, "servable_reason": ""}
    return dataclasses.replace(_inspected_tiny_moe(), **(facts | changes))


@functools.cache
def _inspected_tiny_moe() -> ModelSpec:
    return ModelInspector().inspect(_TINY_MOE)


def dense_model() -> ModelSpec:
    return shaped_model(name="dense-8b", experts=0, width=0, layers=32, dense_width=12288)


def tiny_moe_int4() -> ModelSpec:
    """The bundled model with its experts in compressed-tensors' INT4, with zero points."""
    model, group = tiny_moe(), 64
    expert_bytes = round(model.expert_params * (4 + (16 + 4) / group) / 8)
    return dataclasses.replace(
        model,
        quant_method="compressed-tensors",
        weight_bits=4 + (16 + 4) / group,
        expert_format="int4",
        int4=Int4Scheme(group=group, zero_points=True, act_order=False),
        weight_bytes=model.weight_bytes - model.expert_weight_bytes + expert_bytes,
        expert_weight_bytes=expert_bytes,
    )
