"""A value that cannot be ends in one sentence that names file and field."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.specs.model import ModelSpec
from tests.unit.inspection.conftest import CONFIGS
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
    assert re.match("config.json: num_experts_per_tok:.*129,.*128.* 0$", message(error))


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
    assert re.match(f'config.json: {field}:.*"{value}",.*bfloat16, float,', message(error))


def test_unknown_dtype_of_a_nested_object_names_it(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_vl_moe")
    config["text_config"]["dtype"] = "int3"
    with pytest.raises(InputError, match=r'config\.json: text_config\.dtype: .*"int3"'):
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
    with pytest.raises(InputError, match=r"hf_quant_config\.json:.*(regular file|cannot)"):
        ModelInspector().inspect(folder)


def test_an_array_shorter_than_the_layers_is_refused(load_config: Load, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match="moe_topk: got 3 entries"):
        inspect_config({**load_config("hunyuan"), "moe_topk": [8, 8, 8]})


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("arctic", {"moe_layer_frequency": 0}, "moe_layer_frequency"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval"),
        ("qwen3_moe", {"mlp_only_layers": "[0, 1]"}, "mlp_only_layers"),
        ("minimax_m2", {"layer_types": '["full_attention"]'}, "layer_types"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8", "ignored_layers": "['a']"}}, "ignored_layers"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8", "weight_block_size": "[128]"}}, "weight_block"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "weight_block"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}, "group_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_zero_to_divide_by_and_a_quoted_list_are_refused_by_their_key(
    name: str, changes: dict[str, Any], key: str, load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=key):
        inspect_config({**load_config(name), **changes})


def test_a_group_of_experts_without_end_is_a_channel(load_config: Load, inspect_config: Inspect) -> None:
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    assert inspect_config({**load_config("qwen3_moe"), "quantization_config": scheme}).weight_bits == 4


def test_a_step_of_zero_means_no_experts_where_the_class_asks_first(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("llama4")
    config["text_config"]["interleave_moe_layer_step"] = 0
    assert not inspect_config(config).is_moe


def test_a_key_given_twice_is_said_and_the_last_counts(load_config: Load, inspect_config: Inspect) -> None:
    text = json.dumps(load_config("qwen3_moe")).replace('"num_experts": 128', '"num_experts": 64, "num_experts": 128')
    spec = inspect_config(text)
    assert spec.num_experts == 128
    (warning,) = [line for line in spec.warnings if "num_experts" in line]
    assert "given 2 times" in warning


def test_what_a_configuration_warns_of_is_told_with_its_refusal(load_config: Load, inspect_config: Inspect) -> None:
    text = json.dumps(load_config("qwen3_moe")).replace('"num_experts": 128', '"num_experts": 128, "num_experts": 4')
    with pytest.raises(InputError, match="num_experts_per_tok") as refusal:
        inspect_config(text)
    (warning,) = refusal.value.__notes__
    assert "num_experts" in warning


@pytest.mark.parametrize(("key", "value"), [("num_local_experts", 64), ("n_routed_experts", 64), ("moe_topk", 2)])
def test_two_counts_that_disagree_are_said_by_their_keys(
    key: str, value: int, load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), key: value})
    used = "num_experts_per_tok" if key == "moe_topk" else "num_experts"
    (warning,) = [line for line in spec.warnings if key in line]
    assert f"{used}: got" in warning
    assert (spec.num_experts, spec.top_k) == (128, 8)


def test_two_counts_that_agree_are_no_warning(load_config: Load, inspect_config: Inspect) -> None:
    plain = inspect_config(load_config("qwen3_moe"))
    assert inspect_config({**load_config("qwen3_moe"), "num_local_experts": 128}).warnings == plain.warnings


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_no_published_configuration_is_said_to_contradict_itself(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = ModelInspector(trust_remote_code=True).inspect(folder)
    assert not [line for line in spec.warnings if "is used" in line or "given" in line]
