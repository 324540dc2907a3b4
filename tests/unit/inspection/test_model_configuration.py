"""Which object of a file describes the language model, and how its values are read."""

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


def test_a_class_whose_published_file_has_no_sizes_is_known_by_its_name(inspect_config: Inspect) -> None:
    spec = inspect_config({"architectures": ["HfMoondream"], "model_type": "moondream3", "config": {}})
    assert (spec.num_experts, spec.top_k, spec.num_moe_layers, spec.num_layers) == (64, 8, 20, 24)
    assert round(spec.total_params / 1e9, 1) == 8.8


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("yarn", 'rope_scaling: got "yarn"'),
        ([4.0], "rope_scaling: got an array"),
        ({"rope_type": "linear", "factor": "four"}, 'rope_scaling.factor: got "four"'),
    ],
)
def test_rope_scaling_of_a_wrong_type_is_refused(
    scaling: object, words: str, load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        inspect_config({**load_config("qwen3_moe"), "rope_scaling": scaling})
