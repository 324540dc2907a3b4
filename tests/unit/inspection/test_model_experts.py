"""Which experts a configuration describes: how many, where, of which shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]


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
    assert (more.mtp_layers, more.mtp_weight_bytes) == (3, None)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "mimo", "ernie4_5_moe", "qwen3_5_moe"])
def test_published_families_say_that_they_have_prediction_layers(
    name: str, load_config: Load, inspect_config: Inspect
) -> None:
    # Of Qwen3-Next only the weight files say it: test_checkpoint_headers.py.
    assert inspect_config(load_config(name)).mtp_layers == 1


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


def test_experts_for_images_are_weights_that_text_does_not_use(load_config: Load, inspect_config: Inspect) -> None:
    text = load_config("ernie4_5_moe")
    pairs = {"moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_layer_start_index": [1, 1]}
    both = inspect_config({**text, **pairs, "moe_layer_end_index": [27, 27]})
    alone = inspect_config(text)
    assert (both.num_experts, both.moe_intermediate_size) == (64, 1536)
    assert both.active_params == alone.active_params
    assert both.total_params - alone.total_params == 27 * 64 * (3 * 2560 * 512 + 2560 + 1)


@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok"])
def test_an_array_of_counts_is_refused_where_the_architecture_has_one_number(
    field: str, load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=f"{field}: .*array, .*integer"):
        inspect_config({**load_config("qwen3_moe"), field: [8]})


def test_the_gate_of_a_shared_expert_without_width_is_made_all_the_same(
    load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("qwen2_moe"), "shared_expert_intermediate_size": 0})
    assert (spec.num_shared_experts, spec.shared_expert_params) == (0, spec.num_moe_layers * spec.hidden_size)


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
