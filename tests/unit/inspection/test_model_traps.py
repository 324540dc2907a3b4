"""What real configuration files do, each by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]


def assert_dense(spec: ModelSpec) -> None:
    assert not spec.is_moe
    assert (spec.num_experts, spec.top_k, spec.num_shared_experts, spec.moe_intermediate_size) == (0, 0, 0, 0)
    assert spec.num_moe_layers == 0
    assert spec.expert_params == 0
    assert spec.active_params == spec.total_params


# --- dense models that look like mixtures ---


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granitemoehybrid_dense", {}),
        ("granitemoe", {"num_local_experts": 0}),
        ("jamba", {"num_experts": 1}),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"mlp_only_layers": list(range(48))}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("deepseek_v3", {"first_k_dense_replace": 61}),
        ("deepseek_v3", {"n_routed_experts": None}),
        ("ernie4_5_moe", {"moe_num_experts": 0}),
        ("gemma4_moe", {"text_config.enable_moe_block": False}),
        ("nemotron_h", {"n_routed_experts": 8}),
        ("lfm2_moe", {"num_dense_layers": 24}),
    ],
)
def test_a_dense_model_that_looks_like_a_mixture_is_dense(
    name: str, changes: dict[str, Any], load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config(name)
    for field, value in changes.items():
        *nest, last = field.split(".")
        inner = config
        for key in nest:
            inner = inner[key]
        inner[last] = value
    assert_dense(inspect_config(config))


def test_missing_expert_count_is_dense_and_says_what_the_class_would_assume(
    load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config("mixtral")
    del config["num_local_experts"]
    spec = inspect_config(config)
    assert_dense(spec)
    assert any("8 experts" in warning for warning in spec.warnings)


def test_generation_field_top_k_is_not_the_routing_top_k(load_config: Load, inspect_config: Inspect) -> None:
    assert inspect_config({**load_config("qwen3_moe"), "top_k": 50}).top_k == 8
    assert_dense(inspect_config({**load_config("llama"), "top_k": 50, "top_p": 0.9}))


# --- shared experts ---


def test_a_width_alone_makes_one_shared_expert(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen2_moe")
    assert inspect_config(config).num_shared_experts == 1
    without = inspect_config({**config, "shared_expert_intermediate_size": 0})
    assert without.num_shared_experts == 0


def test_an_architecture_may_have_a_shared_expert_that_no_field_names(
    load_config: Load, inspect_config: Inspect
) -> None:
    assert "shared" not in json.dumps(load_config("llama4")["text_config"])
    assert inspect_config(load_config("llama4")).num_shared_experts == 1


def test_a_count_of_null_is_no_shared_expert(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config({**load_config("deepseek_v3"), "n_shared_experts": None})
    assert spec.num_shared_experts == 0


# --- which layers ---


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, tuple(range(1, 48, 2))),
        ("qwen3_moe", {"mlp_only_layers": [0, 47]}, tuple(range(1, 47))),
        ("deepseek_v3", {"first_k_dense_replace": 3, "moe_layer_freq": 2}, tuple(range(4, 61, 2))),
        ("jamba", {"expert_layer_period": 4, "expert_layer_offset": 3}, tuple(range(3, 32, 4))),
        ("llama4_interleaved", {}, tuple(range(1, 48, 2))),
        ("step3_vl", {}, tuple(range(4, 60))),
        ("mimo_v2_flash", {}, tuple(range(1, 48))),
        ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_end_index": -1}, tuple(range(3, 28))),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 9}, (1, 3, 5, 7, 9)),
        ("afmoe", {}, tuple(range(2, 32))),
        ("arctic", {"moe_layer_frequency": 2}, tuple(range(1, 35, 2))),
        ("hunyuan", {"moe_layer_num_skipped": 2}, tuple(range(2, 32))),
    ],
)
def test_the_layers_with_experts_follow_the_families_rule(
    name: str, changes: dict[str, Any], layers: tuple[int, ...], load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config({**load_config(name), **changes}).moe_layers == layers


def test_pattern_string_says_what_each_layer_is(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("nemotron_h_moe")
    spec = inspect_config(config)
    pattern = config["hybrid_override_pattern"]
    assert spec.moe_layers == tuple(i for i, letter in enumerate(pattern) if letter == "E")
    assert spec.attention.num_attention_layers == pattern.count("*")


def test_layer_count_from_the_array_that_names_the_layers(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("nemotron_h_unnumbered")
    assert config.get("num_hidden_layers") is None
    assert inspect_config(config).num_layers == len(config["layers_block_type"])


def test_prediction_layers_are_left_out(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("deepseek_v3")
    assert config["num_nextn_predict_layers"] == 1
    more = inspect_config({**config, "num_nextn_predict_layers": 3})
    assert more.total_params == inspect_config(config).total_params
    assert more.num_layers == 61


# --- expert shapes ---


def test_ungated_experts_have_two_matrices(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config(load_config("nemotron_h_moe"))
    assert spec.expert_matrices == 2
    assert spec.expert_params == 23 * 128 * 2 * 2688 * 1856


def test_latent_experts_read_the_latent(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("nemotron_h_latent")
    spec = inspect_config(config)
    assert spec.expert_hidden_size == config["moe_latent_size"] == 1024
    assert spec.hidden_size == 4096
    assert spec.expert_params == 40 * 512 * 2 * 1024 * 2688


def test_biases_of_experts_and_router_count(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config(load_config("gpt_oss"))
    assert spec.expert_has_bias
    assert spec.expert_params == 36 * 128 * (3 * 2880 * 2880 + 2 * 2880 + 2880)
    assert spec.router_params == 36 * (2880 * 128 + 128)


def test_zero_experts_have_no_weights(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("longcat_flash")
    spec = inspect_config(config)
    assert spec.num_experts == 512
    assert spec.expert_params == 28 * 512 * 3 * 6144 * 2048
    none = inspect_config({**config, "zero_expert_num": 0})
    assert spec.total_params - none.total_params == 28 * 256 * 6144, "only router rows"
    assert any("zero experts" in warning for warning in spec.warnings)


def test_an_array_of_equal_values_counts_as_the_value(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("hunyuan")
    assert isinstance(config["moe_topk"], list)
    scalar = {**config, "moe_topk": 8, "moe_intermediate_size": 3072, "num_shared_expert": 1}
    assert inspect_config(config).total_params == inspect_config(scalar).total_params


def test_array_valued_expert_widths_may_differ(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("hunyuan")
    config["moe_intermediate_size"][0] = 1024
    same = inspect_config(load_config("hunyuan"))
    assert same.expert_params - inspect_config(config).expert_params == 64 * 3 * 4096 * (3072 - 1024)


def test_attention_experts_count_as_idle(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config(load_config("jetmoe"))
    idle = spec.total_params - spec.active_params
    assert idle == 24 * 6 * (3 * 2048 * 5632 + 2 * 2048 * 2048)
    assert spec.expert_params == 24 * 8 * (3 * 2048 * 5632 + 2 * 2048 * 2048)
    assert spec.expert_weight_bytes == 2 * spec.expert_params
    assert spec.attention_params == 24 * (2048 + 2048 * 8 + 2048 * 2 * 2048)


# --- where the language model is ---


@pytest.mark.parametrize("nest", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_a_nested_language_model_counts_as_alone(nest: str, load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_moe")
    outer = {"model_type": "some_vl", "architectures": ["SomeVL"], nest: config, "vision_config": {"hidden_size": 7}}
    assert inspect_config(outer).total_params == inspect_config(config).total_params


def test_a_language_model_nested_twice_is_found(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config(load_config("qwen3_omni_moe"))
    assert (spec.num_experts, spec.model_type) == (128, "qwen3_omni_moe_text")
    assert spec.architecture == "Qwen3OmniMoeForConditionalGeneration"


def test_tying_beside_the_nested_object_holds_for_it(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_vl_moe")
    config["text_config"].pop("tie_word_embeddings", None)
    tied = inspect_config({**config, "tie_word_embeddings": True})
    assert tied.lm_head_params == 0
    assert inspect_config({**config, "tie_word_embeddings": False}).lm_head_params > 0


def test_sizes_left_out_of_a_nested_object_are_its_class_defaults(load_config: Load, inspect_config: Inspect) -> None:
    assert "hidden_size" not in load_config("llava")["text_config"]
    assert inspect_config(load_config("llava")).total_params == 6_738_939_904
    assert inspect_config(load_config("gemma3")).attention.num_kv_heads == 4


def test_a_missing_model_type_is_told_by_the_architecture(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("longcat_flash")
    assert "model_type" not in config
    assert inspect_config(config).num_layers == 28


def test_architecture_decides_over_a_misleading_model_type(load_config: Load, inspect_config: Inspect) -> None:
    config = {**load_config("grok_1"), "model_type": "git", "architectures": ["Grok1ForCausalLM"]}
    assert inspect_config(config).total_params == inspect_config(load_config("grok_1")).total_params


def test_unknown_family_is_read_by_its_fields(load_config: Load, inspect_config: Inspect) -> None:
    config = {**load_config("mixtral"), "model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]}
    spec = inspect_config(config)
    assert (spec.num_experts, spec.top_k, spec.moe_intermediate_size) == (8, 2, 14336)
    assert spec.total_params == 46_702_792_704
    assert any("brand_new" in warning for warning in spec.warnings)


# --- numbers that JSON does not have ---


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_bare_tokens_in_unrelated_fields_are_read_over(token: str, load_config: Load, inspect_config: Inspect) -> None:
    text = json.dumps(load_config("qwen3_moe"))[:-1] + f', "rope_cap": {token}, "time_step_limit": [0.0, {token}]}}'
    assert inspect_config(text).num_experts == 128


def test_duplicate_keys_keep_the_last(load_config: Load, inspect_config: Inspect) -> None:
    text = json.dumps(load_config("qwen3_moe"))[:-1] + ', "num_experts": 64}'
    assert inspect_config(text).num_experts == 64


def test_explicit_null_is_not_the_class_default(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("deepseek_v2")
    assert config["q_lora_rank"] is None
    assert inspect_config(config).total_params == 15_706_484_224


# --- attention ---


@pytest.mark.parametrize(
    ("name", "kind", "heads", "window", "windowed"),
    [
        ("mixtral", "gqa", (32, 8, 128), None, 0),
        ("olmoe", "mha", (16, 16, 128), None, 0),
        ("deepseek_v3", "mla", (128, 128, 192), None, 0),
        ("qwen3_next", "hybrid", (16, 2, 256), None, 0),
        ("kimi_linear", "hybrid", (32, 32, 192), None, 0),
        ("gpt_oss", "gqa", (64, 8, 64), 128, 18),
        ("llama4", "gqa", (40, 8, 128), 8192, 36),
        ("gemma3", "gqa", (8, 4, 256), 1024, 29),
        ("qwen2_moe", "mha", (16, 16, 128), None, 0),
    ],
)
def test_the_kind_of_attention_is_told_by_the_fields(
    name: str,
    kind: str,
    heads: tuple[int, int, int],
    window: int | None,
    windowed: int,
    load_config: Load,
    inspect_config: Inspect,
) -> None:
    attention = inspect_config(load_config(name)).attention
    assert attention.kind == kind
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == heads
    assert (attention.sliding_window, attention.num_windowed_layers) == (window, windowed)


def test_layers_that_borrow_a_cache_add_none(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("hunyuan")
    shared = inspect_config({**config, "use_cla": True, "cla_share_factor": 2})
    assert shared.kv_bytes_per_token * 2 == inspect_config(config).kv_bytes_per_token


def test_a_latent_family_may_have_ordinary_attention(load_config: Load, inspect_config: Inspect) -> None:
    zero = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "kv_lora_rank": None, "use_mla": False}
    spec = inspect_config({**load_config("deepseek_v2"), **zero})
    assert spec.attention.kind == "mha"
    assert spec.kv_bytes_per_token == 27 * 2 * 2048 * 2


def test_experts_for_images_are_weights_that_text_does_not_use(load_config: Load, inspect_config: Inspect) -> None:
    text = load_config("ernie4_5_moe")
    pairs = {"moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_layer_start_index": [1, 1]}
    both = inspect_config({**text, **pairs, "moe_layer_end_index": [27, 27]})
    alone = inspect_config(text)
    assert (both.num_experts, both.moe_intermediate_size) == (64, 1536)
    assert both.active_params == alone.active_params
    assert both.total_params - alone.total_params == 27 * 64 * (3 * 2560 * 512 + 2560 + 1)


def test_expert_count_of_a_dense_architecture_is_ignored_with_a_warning(
    load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("llama"), "num_local_experts": 8, "num_experts_per_tok": 2})
    assert_dense(spec)
    assert any("num_local_experts" in warning for warning in spec.warnings)


# --- where vLLM and transformers differ ---


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("nemotron_h_moe", {"num_hidden_layers": 50}, "letters"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"mlp_bias": True, "moe_layer_freq": 2}, "moe_layer_freq"),
        ("afmoe", {"attention_bias": True}, "attention_bias"),
        ("nemotron_h_moe", {"n_shared_experts": 0}, "n_shared_experts"),
        ("deepseek_v4", {"n_shared_experts": 0}, "n_shared_experts"),
        ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts"),
    ],
)
def test_a_disagreement_of_vllm_and_transformers_is_a_warning(
    name: str, changes: dict[str, Any], word: str, load_config: Load, inspect_config: Inspect
) -> None:
    assert not inspect_config(load_config(name)).warnings
    assert any(word in warning for warning in inspect_config({**load_config(name), **changes}).warnings)


def test_llama4_follows_vllms_step_not_the_list(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("llama4_interleaved")
    config["text_config"]["moe_layers"] = [0, 1]
    spec = inspect_config(config)
    assert spec.num_moe_layers == 24
    assert any("interleave_moe_layer_step" in warning for warning in spec.warnings)


def test_key_value_heads_that_do_not_divide_the_query_heads_are_refused(
    load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match="num_key_value_heads: got 5, expected a divisor of the 32 query heads"):
        inspect_config({**load_config("qwen3_moe"), "num_key_value_heads": 5})


@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok"])
def test_an_array_of_counts_is_refused_where_the_architecture_has_one_number(
    field: str, load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=f"{field}: got an array, expected an integer"):
        inspect_config({**load_config("qwen3_moe"), field: [8]})


def test_the_gate_of_a_shared_expert_without_width_is_made_all_the_same(
    load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("qwen2_moe"), "shared_expert_intermediate_size": 0})
    assert (spec.num_shared_experts, spec.shared_expert_params) == (0, spec.num_moe_layers * spec.hidden_size)


def test_a_class_whose_published_file_has_no_sizes_is_known_by_its_name(inspect_config: Inspect) -> None:
    spec = inspect_config({"architectures": ["HfMoondream"], "model_type": "moondream3", "config": {}})
    assert (spec.num_experts, spec.top_k, spec.num_moe_layers, spec.num_layers) == (64, 8, 20, 24)
    assert round(spec.total_params / 1e9, 1) == 8.8


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("yarn", 'rope_scaling: got "yarn", expected an object'),
        ([4.0], "rope_scaling: got an array, expected an object"),
        ({"rope_type": "linear", "factor": "four"}, 'rope_scaling.factor: got "four", expected a number'),
    ],
)
def test_rope_scaling_of_a_wrong_type_is_refused(
    scaling: object, words: str, load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        inspect_config({**load_config("qwen3_moe"), "rope_scaling": scaling})


def test_sink_attention_has_keys_of_two_parts_and_values_of_another_width(inspect_config: Inspect) -> None:
    spec = inspect_config(
        {
            "architectures": ["PanguProMoEV2ForCausalLM"], "model_type": "pangu_pro_moe_v2",
            "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "qk_nope_dim": 3, "qk_rope_dim": 1, "v_channels": 5, "qkv_bias": True, "param_sink_number": 7,
            "param_sink_with_value": True, "sandwich_norm": True, "vocab_size": 10, "tie_word_embeddings": False,
            "intermediate_size": 6, "moe_intermediate_size": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "first_k_dense_replace": 1,
        }
    )  # fmt: skip
    attention = 9 * (16 + 8 + 10) + 4 + 20 * 8 + 7 * (8 + 10)
    assert spec.attention_params == 2 * attention
    assert spec.total_params == 2 * attention + 3 * 8 * 6 + 5 * 3 * 8 * 3 + 8 * 4 + 8 * (2 * 4 + 1) + 2 * 80
    assert (spec.kv_bytes_per_token, spec.attention.kind, spec.moe_layers) == (2 * 2 * (8 + 10), "gqa", (1,))


@pytest.mark.parametrize("with_pattern", [True, False])
def test_blocks_with_experts_of_their_own_are_counted_each(
    with_pattern: bool, load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config("nemotron_h_moe")
    whole = inspect_config(config)
    words = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    blocks: list[dict[str, Any]] = [{"block_type": words[letter]} for letter in config["hybrid_override_pattern"]]
    for block in blocks:
        if block["block_type"] == "moe":
            block |= {
                name: config[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
            }
    first = next(block for block in blocks if block["block_type"] == "moe")
    first["n_routed_experts"] //= 2
    left_out = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    config = {name: value for name, value in config.items() if name not in left_out}
    if not with_pattern:
        del config["hybrid_override_pattern"]
    spec = inspect_config(
        {**config, "architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle",
         "block_configs": blocks}
    )  # fmt: skip
    expert = whole.expert_params // (whole.num_experts * whole.num_moe_layers)
    assert whole.expert_params - spec.expert_params == whole.num_experts // 2 * expert
    assert (spec.num_experts, spec.moe_layers) == (whole.num_experts, whole.moe_layers)
