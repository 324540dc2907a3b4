"""A value that cannot be ends in one sentence that names file and field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.specs.model import ModelSpec
from tests.unit.inspection.one_sentence import message

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]
Folder = Callable[..., Path]


COUNTS = ("num_experts", "moe_intermediate_size", "hidden_size", "num_hidden_layers")
NO_COUNTS = (-1, "128", 8.5, float("nan"), float("inf"), True, {}, 10**400, [1, "2"])
# A width of 10**9 is absurd, but the arithmetic holds; so many experts or layers are refused.
IMPOSSIBLE = [(field, value) for field in COUNTS for value in NO_COUNTS]
IMPOSSIBLE += [("num_experts", 10**9), ("num_hidden_layers", 10**9)]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_a_count_that_cannot_be_is_refused_by_its_field(
    field: str, value: Any, load_config: Load, inspect_config: Inspect
) -> None:
    text = json.dumps({**load_config("qwen3_moe"), field: value})
    with pytest.raises(InputError) as error:
        inspect_config(text)
    assert message(error).startswith("config.json")
    assert field in message(error) or "not valid JSON" in message(error)


def test_more_experts_per_token_than_experts_are_refused(load_config: Load, inspect_config: Inspect) -> None:
    with pytest.raises(InputError) as error:
        inspect_config({**load_config("qwen3_moe"), "num_experts_per_tok": 129})
    assert message(error) == "config.json: num_experts_per_tok: got 129, expected at most the 128 experts of layer 0"


def test_no_expert_per_token_is_refused(load_config: Load, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match="num_experts_per_tok"):
        inspect_config({**load_config("qwen3_moe"), "num_experts_per_tok": 0})


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_refused_by_its_field(field: str, load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_moe")
    del config[field]
    with pytest.raises(InputError, match=f"{field}: is missing"):
        inspect_config(config)


def test_errors_in_a_nested_object_name_it(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_vl_moe")
    config["text_config"]["num_experts"] = -4
    with pytest.raises(InputError, match=r"config\.json: text_config\.num_experts: got -4"):
        inspect_config(config)


def test_a_configuration_nested_in_itself_too_often_is_refused(load_config: Load, inspect_config: Inspect) -> None:
    config: dict[str, Any] = load_config("qwen3_moe")
    for _ in range(20):
        config = {"text_config": config}
    with pytest.raises(InputError, match="within 3 levels"):
        inspect_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": "Qwen3MoeForCausalLM"},
        {"architectures": [1]},
        {"model_type": 7, "architectures": None},
        {"tie_word_embeddings": "yes"},
        {"mlp_only_layers": "all"},
        {"mlp_only_layers": [0, -1]},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "gptq", "bits": -4}},
        {"quantization_config": {"quant_method": "gptq", "bits": "four"}},
        {"max_position_embeddings": -5},
        {"num_attention_heads": 0},
        {"vocab_size": None, "num_experts": "NaN"},
        {"torch_dtype": ["bfloat16"]},
        {"dtype": 16},
        {"auto_map": 4},
        {"auto_map": "modeling_own.Own"},
        {"auto_map": {"AutoConfig": 5}},
        {"layer_types": [1] * 48},
    ],
)
def test_a_value_of_a_wrong_type_is_refused(
    changes: dict[str, Any], load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError) as error:
        inspect_config({**load_config("qwen3_moe"), **changes})
    assert message(error).startswith("config.json: ")


def test_a_wrong_type_in_the_file_beside_the_configuration_is_refused(
    load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=r"hf_quant_config\.json: quantization\.quant_algo: got 7"):
        inspect_config(load_config("qwen3_moe"), {"hf_quant_config.json": b'{"quantization": {"quant_algo": 7}}'})


@pytest.mark.parametrize(
    ("field", "value"), [("torch_dtype", "int3"), ("dtype", "bfloat"), ("torch_dtype", "torch.bf16"), ("dtype", "")]
)
def test_an_unknown_dtype_is_refused_with_those_that_are_known(
    field: str, value: str, load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config("qwen3_moe")
    config.pop("torch_dtype", None)
    with pytest.raises(InputError) as error:
        inspect_config({**config, field: value})
    assert message(error).startswith(f'config.json: {field}: got "{value}", expected one of bfloat16, float, float16')


def test_unknown_dtype_of_a_nested_object_names_it(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_vl_moe")
    config["text_config"]["dtype"] = "int3"
    with pytest.raises(InputError, match=r'config\.json: text_config\.dtype: got "int3"'):
        inspect_config(config)


@pytest.mark.parametrize(("value", "dtype"), [("half", "float16"), ("torch.float", "float32"), (None, "bfloat16")])
def test_every_name_of_a_dtype_is_known(
    value: str | None, dtype: str, load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config({**load_config("qwen3_moe"), "torch_dtype": value}).dtype == dtype


def test_a_dtype_that_vllm_does_not_compute_in_is_said(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), "torch_dtype": "float8_e4m3fn"})
    assert spec.dtype == "bfloat16"
    assert "float8_e4m3fn" in " ".join(spec.warnings)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_quantisation_file_that_is_no_file_is_refused(
    make: Callable[[Path], None], load_config: Load, model_folder: Folder
) -> None:
    folder = model_folder(load_config("qwen3_moe"))
    make(folder / "hf_quant_config.json")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: (is not a regular file|cannot be read)"):
        ModelInspector().inspect(folder)


def test_an_array_shorter_than_the_layers_is_refused(load_config: Load, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match="moe_topk: got 3 entries"):
        inspect_config({**load_config("hunyuan"), "moe_topk": [8, 8, 8]})
