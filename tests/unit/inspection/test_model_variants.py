"""Small models with the optional parts switched on and off, against the class that transformers builds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.specs.model import ModelSpec

SMALL = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 64}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True, "mlp_bias": True}),
    ("gemma3_text", {"head_dim": 64, "tie_word_embeddings": False}),
    ("gemma4_text", {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 2, "attention_k_eq_v": True}),
    ("phi", {"qk_layernorm": True}),
    ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": False}),
    ("cohere", {"use_qk_norm": True}),
    ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 80, "do_layer_norm_before": False}),
    ("starcoder2", {"use_bias": False}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "shared_expert_intermediate_size": 96}),
    ("qwen3_moe", {"attention_bias": True, "mlp_only_layers": [0, 5]}),
    ("qwen3_next", {"attention_bias": True, "decoder_sparse_step": 2}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 2}),
    ("deepseek_v3", {"q_lora_rank": 64, "n_shared_experts": 3, "first_k_dense_replace": 0}),
    ("deepseek_v32", {"q_lora_rank": 64, "index_n_heads": 4, "index_head_dim": 32}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    ("dots1", {"n_shared_experts": 2, "attention_bias": True}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 2, "use_bias": True}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_end_index": 3, "use_bias": False}),
    ("exaone_moe", {"first_k_dense_replace": 2, "num_shared_experts": 2}),
    ("granitemoeshared", {"shared_intermediate_size": 48}),
    ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 3, "expert_layer_offset": 2}),
    ("lfm2_moe", {"num_dense_layers": 2, "use_expert_bias": False, "layer_types": ["conv", "full_attention"] * 3}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 72}),
    ("mixtral", {"head_dim": 64}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    ("nemotron_h", {"hybrid_override_pattern": "M*-E*E", "moe_latent_size": 32, "mlp_bias": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mlp_bias": True, "mamba_proj_bias": True}),
    ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": [4, 8, 4, 8, 4, 8]}),
    ("minimax", {"layer_types": ["full_attention", "linear_attention"] * 3}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 3, "mamba_n_heads": 4, "mamba_d_head": 64}),
]


@pytest.mark.parametrize(
    ("model_type", "changes"), VARIANTS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(VARIANTS)]
)
def test_optional_parts_count_as_in_transformers(
    model_type: str, changes: dict[str, Any], inspect_config: Callable[..., ModelSpec]
) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = set(CONFIG_MAPPING[model_type]().to_dict())
    config = {name: value for name, value in SMALL.items() if name in fields} | changes
    built = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built, attn_implementation="eager")
    expected = sum(parameter.numel() for parameter in model.parameters())
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    spec = inspect_config({"model_type": model_type, "architectures": [architecture], **config})
    assert spec.total_params == expected
