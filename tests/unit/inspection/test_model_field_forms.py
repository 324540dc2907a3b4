"""Forms that fields take in published files beside the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]

EXAONE_MOE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "is_moe_layer": [False] + [True] * 47,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_shared_experts": 1,
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 153600,
}
MINICPM3: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "tie_word_embeddings": True,
    "vocab_size": 73448,
}
UNKNOWN: dict[str, Any] = {
    "architectures": ["NovelForCausalLM"],
    "model_type": "novel",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
}


def test_expert_layers_may_be_listed_as_booleans(inspect_config: Inspect) -> None:
    spec = inspect_config(EXAONE_MOE)
    assert spec.moe_layers == tuple(range(1, 48))
    assert spec.total_params == 236_571_150_336  # transformers' class on the meta device


def test_a_list_of_one_holds_for_every_layer_where_an_architecture_has_lists(
    load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config("mixtral")
    config |= {"model_type": "skywork_moe", "architectures": ["SkyworkForCausalLM"], "num_experts": 8}
    assert inspect_config({**config, "num_experts": [8]}).total_params == inspect_config(config).total_params


def test_value_heads_share_the_hidden_size_where_minicpm3_does_not_give_their_width(inspect_config: Inspect) -> None:
    spec = inspect_config(MINICPM3)
    assert spec.total_params == 4_073_875_968  # vLLM's and transformers' class, on the meta device
    assert spec == inspect_config({**MINICPM3, "v_head_dim": 64})


def test_a_switch_turns_the_experts_of_an_unknown_family_off(inspect_config: Inspect) -> None:
    experts = {"num_experts": 16384, "num_experts_per_tok": 64}
    assert inspect_config({**UNKNOWN, **experts}).is_moe
    assert not inspect_config({**UNKNOWN, **experts, "is_moe": False}).is_moe
    assert not inspect_config({**UNKNOWN, **experts, "use_moe": False}).is_moe


def test_experts_described_in_a_nested_object(inspect_config: Inspect) -> None:
    nested = {"moe_num_experts": 32, "moe_top_k": 2, "ffn_hidden_size": 8192}
    spec = inspect_config({**UNKNOWN, "model_type": "yuan", "architectures": ["YuanForCausalLM"], "moe_config": nested})
    assert (spec.num_experts, spec.top_k, spec.moe_intermediate_size) == (32, 2, 8192)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dbrx", {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 1, "moe_top_k": 1}}),
        ("granitemoehybrid", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    ],
)
def test_one_expert_is_an_ordinary_feed_forward_part(
    name: str, changes: dict[str, Any], load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config(name), **changes})
    assert (spec.is_moe, spec.num_experts, spec.expert_params, spec.num_moe_layers) == (False, 0, 0, 0)
    assert spec.dense_params > 0
    assert spec.active_params == spec.total_params


def test_architecture_that_vllm_runs_through_transformers_is_servable(
    load_config: Load, inspect_config: Inspect
) -> None:
    pytest.importorskip("vllm.version")
    spec = inspect_config(load_config("dots1"))
    assert spec.servable is True
    assert "Transformers backend" in spec.servable_reason


def test_encoder_decoder_is_refused_by_its_kind(inspect_config: Inspect) -> None:
    config = {"architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"}
    with pytest.raises(UnsupportedError, match="is_encoder_decoder"):
        inspect_config({**config, "d_model": 768, "num_layers": 12, "num_experts": 8, "is_encoder_decoder": True})


def test_attention_and_recurrence_side_by_side_in_every_layer_is_hybrid(inspect_config: Inspect) -> None:
    spec = inspect_config(
        {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "head_dim": 128,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "mamba_d_conv": 4,
            "mamba_d_head": 128,
            "mamba_d_ssm": 3072,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
            "num_attention_heads": 12,
            "num_hidden_layers": 44,
            "num_key_value_heads": 2,
            "vocab_size": 130048,
        }
    )
    assert spec.attention.kind == "hybrid"
    assert spec.attention.num_attention_layers == 44


def test_longcat_counts_its_tables_of_token_sequences(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("longcat_flash")
    ngrams = {"ngram_vocab_size_ratio": 78, "emb_split_num": 4, "emb_neighbor_num": 4}
    plain = inspect_config(config)
    spec = inspect_config({**config, **ngrams, "architectures": ["LongcatFlashNgramForCausalLM"]})
    tables, width, hidden_size = 12, config["hidden_size"] // 12, config["hidden_size"]
    rows = sum(78 * config["vocab_size"] + 2 * i + 1 for i in range(tables))
    assert spec.embedding_params - plain.embedding_params == rows * width
    assert spec.total_params - plain.total_params == rows * width + tables * width * hidden_size
    assert spec.expert_params == plain.expert_params


@pytest.mark.parametrize("field", ["hidden_size", "num_experts", "num_hidden_layers"])
def test_a_count_with_a_decimal_point_is_refused_as_vllm_refuses_it(
    field: str, load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config("qwen3_moe")
    with pytest.raises(InputError, match=rf"{field}: got \d+\.0,.*integer"):
        inspect_config({**config, field: float(config[field])})


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 8192),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32768),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 8192),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}}}, 16384),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, 8192),
        ({"seq_length": 4096}, 4096),
        ({"model_max_length": 131072}, 131072),
        ({"max_position_embeddings": None, "max_context": 1024}, 1024),
        ({"max_position_embeddings": None}, 0),
    ],
)
def test_the_longest_sequence_follows_vllms_rule(
    changes: dict[str, Any], longest: int, inspect_config: Inspect, load_config: Load
) -> None:
    config = {**load_config("mixtral"), "max_position_embeddings": 8192, **changes}
    assert inspect_config(config).max_model_len == longest
