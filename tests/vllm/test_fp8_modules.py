"""Which modules vLLM's online FP8 converts under a plan's arguments, as vLLM itself decides it; no engine starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from moe_optimizer.plan.decision import Wish
from tests.builders import gpus, made_plan, profile_with, qwen3_30b_a3b

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""As vLLM's models declare them."""
LAYER = "model.layers.3"
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "mlp.shared_expert_gate", "mlp.text_experts_gate")
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.shared_experts.down_proj")

Converted = Callable[[str, str], bool]


@pytest.fixture
def converted_under() -> Callable[[Mapping[str, Any]], Converted]:
    """Returns, for settings of the pass, what tells whether a module of a kind of layers is converted."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kinds = {"linear": LinearBase, "moe": RoutedExperts, "embedding": VocabParallelEmbedding, "head": ParallelLMHead}

    def under(settings: Mapping[str, Any]) -> Converted:
        profile = profile_with(passes={"fp8": dict(settings)})
        plan = made_plan(qwen3_30b_a3b(), gpus("h200"), profile, wishes={"fp8": (Wish.ON, "test")})
        text = plan.serve_args.value("--quantization-config")
        assert text is not None
        arguments = resolve_quantization_config("online", json.loads(text))
        assert arguments is not None
        config = OnlineQuantizationConfig(arguments)
        config.packed_modules_mapping = PACKED
        return lambda kind, module: config.resolve_quant_method_cls(kinds[kind], module) is not None

    return under


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_experts_and_linears_are_converted_and_routers_are_not(
    granularity: str, converted_under: Callable[[Mapping[str, Any]], Converted]
) -> None:
    converted = converted_under({"granularity": granularity})
    assert converted("moe", f"{LAYER}.mlp.experts")
    assert all(converted("linear", f"{LAYER}.{module}") for module in LINEARS)
    assert not any(converted("linear", f"{LAYER}.{module}") for module in ROUTERS)


def test_embeddings_and_head_stay(converted_under: Callable[[Mapping[str, Any]], Converted]) -> None:
    converted = converted_under({})
    assert not converted("embedding", "model.embed_tokens")
    assert not converted("head", "lm_head")


def test_what_the_profile_keeps_stays(converted_under: Callable[[Mapping[str, Any]], Converted]) -> None:
    converted = converted_under({"keep_bf16_layers": ["attention", "shared_experts", "layers.3"]})
    other = "model.layers.13"
    assert not any(converted("linear", f"{LAYER}.{module}") for module in LINEARS)
    assert not converted("moe", f"{LAYER}.mlp.experts")
    assert [module for module in LINEARS if converted("linear", f"{other}.{module}")] == ["mlp.gate_up_proj"]
    assert converted("moe", f"{other}.mlp.experts")
