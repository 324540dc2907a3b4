"""Models with the published shapes, built by hand so that these tests do not depend on the inspector."""

from __future__ import annotations

from typing import Any

import pytest

from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.model import AttentionSpec, ModelSpec
from moe_optimizer.specs.quantity import Quantity, Source


def build_model(
    *,
    hidden: int,
    layers: int,
    vocab: int,
    experts: int,
    top_k: int,
    expert_width: int,
    attention: AttentionSpec,
    attention_params: int,
    kv_params: int,
    kv_bytes_per_token: int,
    dense_layers: int = 0,
    dense_width: int = 0,
    shared_experts: int = 0,
    expert_bytes_per_weight: float = 2.0,
    linear_bytes_per_weight: float = 2.0,
    tied: bool = False,
    **changes: Any,
) -> ModelSpec:
    """Return a ModelSpec whose counts follow from its shape; attention counts are for the whole model."""
    moe_layers = layers - dense_layers if experts else 0
    expert_params = moe_layers * experts * 3 * hidden * expert_width
    dense_params = dense_layers * 3 * hidden * dense_width
    shared_params = moe_layers * shared_experts * 3 * hidden * expert_width
    router_params = moe_layers * experts * hidden
    norm_params = (2 * layers + 1) * hidden
    embedding = vocab * hidden
    head = 0 if tied else embedding
    linear = attention_params + dense_params + shared_params
    total = expert_params + linear + router_params + norm_params + embedding + head
    expert_weight_bytes = round(expert_params * expert_bytes_per_weight)
    rest = total - expert_params - linear
    fields: dict[str, Any] = {
        "name": "model",
        "path": "/models/model",
        "architecture": "ModelForCausalLM",
        "model_type": "model",
        "is_moe": experts > 0,
        "num_experts": experts,
        "top_k": top_k,
        "num_shared_experts": shared_experts,
        "moe_intermediate_size": expert_width,
        "expert_hidden_size": hidden if experts else 0,
        "expert_matrices": 3 if experts else 0,
        "expert_activation": "silu" if experts else "",
        "expert_has_bias": False,
        "hidden_size": hidden,
        "num_layers": layers,
        "moe_layers": tuple(range(dense_layers, layers)) if experts else (),
        "vocab_size": vocab,
        "total_params": total,
        "active_params": total - expert_params + (expert_params * top_k // experts if experts else 0),
        "expert_params": expert_params,
        "embedding_params": embedding,
        "lm_head_params": head,
        "attention_params": attention_params,
        "kv_params": kv_params,
        "dense_params": dense_params,
        "shared_expert_params": shared_params,
        "router_params": router_params,
        "quant_method": None,
        "weight_bits": 16,
        "weight_bytes": expert_weight_bytes + round(linear * linear_bytes_per_weight) + rest * 2,
        "expert_weight_bytes": expert_weight_bytes,
        "dtype": "bfloat16",
        "attention": attention,
        "kv_bytes_per_token": kv_bytes_per_token,
        "state_bytes_per_sequence": 0,
        "max_position": 40960,
        "needs_remote_code": False,
        "servable": True,
        "servable_reason": "",
        "warnings": (),
    }
    return ModelSpec(**(fields | changes))


def grouped_attention(*, heads: int, kv_heads: int, head_dim: int, layers: int) -> AttentionSpec:
    return AttentionSpec(
        kind="gqa",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=None,
        num_attention_layers=layers,
        num_windowed_layers=0,
    )


@pytest.fixture(scope="session")
def qwen3_30b_a3b() -> ModelSpec:
    q, kv = 2048 * 32 * 128, 2 * 2048 * 4 * 128
    return build_model(
        hidden=2048,
        layers=48,
        vocab=151936,
        experts=128,
        top_k=8,
        expert_width=768,
        attention=grouped_attention(heads=32, kv_heads=4, head_dim=128, layers=48),
        attention_params=48 * (2 * q + kv + 2 * 128),
        kv_params=48 * kv,
        kv_bytes_per_token=48 * 2 * 4 * 128 * 2,
    )


@pytest.fixture(scope="session")
def mixtral_8x7b() -> ModelSpec:
    q, kv = 4096 * 32 * 128, 2 * 4096 * 8 * 128
    return build_model(
        hidden=4096,
        layers=32,
        vocab=32000,
        experts=8,
        top_k=2,
        expert_width=14336,
        attention=grouped_attention(heads=32, kv_heads=8, head_dim=128, layers=32),
        attention_params=32 * (2 * q + kv),
        kv_params=32 * kv,
        kv_bytes_per_token=32 * 2 * 8 * 128 * 2,
        max_position=32768,
    )


def _deepseek_v3(bytes_per_weight: float, **changes: Any) -> ModelSpec:
    down = 7168 * 1536 + 7168 * (512 + 64) + 1536 + 512
    up = 1536 * 128 * 192 + 512 * 128 * 256
    out = 128 * 128 * 7168
    attention = AttentionSpec(
        kind="mla",
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        sliding_window=None,
        num_attention_layers=61,
        num_windowed_layers=0,
    )
    return build_model(
        hidden=7168,
        layers=61,
        vocab=129280,
        experts=256,
        top_k=8,
        expert_width=2048,
        dense_layers=3,
        dense_width=18432,
        shared_experts=1,
        attention=attention,
        attention_params=61 * (down + up + out),
        kv_params=61 * down,
        kv_bytes_per_token=61 * 576 * 2,
        expert_bytes_per_weight=bytes_per_weight,
        linear_bytes_per_weight=bytes_per_weight,
        max_position=163840,
        **changes,
    )


@pytest.fixture(scope="session")
def deepseek_v3_fp8() -> ModelSpec:
    return _deepseek_v3(1 + 4 / 128**2, quant_method="fp8", weight_bits=8)


@pytest.fixture(scope="session")
def deepseek_v3_bf16() -> ModelSpec:
    return _deepseek_v3(2.0)


@pytest.fixture(scope="session")
def h200_measured() -> GpuSpec:
    """An H200 with the rates measured on one: 4.3e12 bytes/s and 790e12 flop/s in BF16."""

    def quantity(value: float, unit: str) -> Quantity:
        return Quantity(value, unit, Source.MEASURED, "test")

    return GpuSpec(
        key="h200",
        name="NVIDIA H200",
        compute_capability=(9, 0),
        memory=quantity(143771 * 2**20, "bytes"),
        memory_bandwidth=quantity(4.3e12, "bytes/s"),
        dense_flops={"bf16": quantity(790e12, "flop/s"), "fp8": quantity(1580e12, "flop/s")},
        gpu_link_bandwidth=Quantity(450e9, "bytes/s", Source.DATASHEET, "datasheet"),
        gpu_link="nvlink",
        l2_cache=quantity(50 * 2**20, "bytes"),
        sm_count=132,
        max_gpus_per_node=8,
    )
