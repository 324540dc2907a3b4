"""The six places where a checkpoint says how its weights are stored, and what is left out of the scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.inspection.module_patterns import ModulePatterns
from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


def compressed(bits: int, **group: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": 32}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights} | group}}


@pytest.mark.parametrize(
    ("scheme", "method", "bits"),
    [
        (GPTQ, "gptq", 4 + 20 / 128),
        (GPTQ | {"group_size": 32}, "gptq", 4 + 20 / 32),
        (GPTQ | {"group_size": -1}, "gptq", 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq", 4 + 20 / 64),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, "awq", 4 + 20 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8),
        ({"quant_method": "mxfp4"}, "mxfp4", 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes", 8),
        ({"quant_method": "experts_int8"}, "experts_int8", 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt", 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", 4),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, "modelopt", 4.25),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "quark", 4),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
         "quark", 4.25),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "torchao", 8),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, "auto-round", 4 + 20 / 128),
        (compressed(4), "compressed-tensors", 4.5),
        (compressed(4, weights={"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}),
         "compressed-tensors", 4 + 16 / 128),
        (compressed(4, weights={"num_bits": 4, "type": "int", "group_size": 64, "symmetric": False}),
         "compressed-tensors", 4 + 20 / 64),
        ({"quant_method": "compressed-tensors", "config_groups": {"experts": {"weights": {
            "num_bits": 4, "type": "int", "group_size": 64, "symmetric": True}}}}, "compressed-tensors", 4 + 16 / 64),
        (compressed(4, weights={"num_bits": 4, "type": "int", "group_size": 16, "symmetric": True}),
         "compressed-tensors", 4 + 16 / 16),
        (compressed(4, weights={"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}),
         "compressed-tensors", 4 + 8 / 16),
        (GPTQ | {"group_size": 16}, "gptq", 4 + 20 / 16),
        (compressed(4, weights={"num_bits": 4, "type": "float", "group_size": 32}) | {"format": "mxfp4-pack-quantized"},
         "compressed-tensors", 4.25),
        (compressed(8, targets=["Linear"]), "compressed-tensors", 8),
    ],
)  # fmt: skip
def test_a_schemes_method_and_bits_are_told_whatever_its_form(
    scheme: dict[str, Any], method: str, bits: float, load_config: Load, inspect_config: Inspect
) -> None:
    config = load_config("qwen3_moe")
    spec = inspect_config({**config, "quantization_config": scheme})
    assert (spec.quant_method, spec.weight_bits) == (method, bits)
    plain = inspect_config(config)
    assert (plain.quant_method, plain.weight_bits) == (None, 16)
    assert spec.total_params == plain.total_params, "packing changes bytes, not parameters"
    assert spec.weight_bytes < plain.weight_bytes


@pytest.mark.parametrize(
    ("scheme", "fp8"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, False),
        (compressed(8, weights={"num_bits": 8, "type": "float", "strategy": "channel"}), True),
        (compressed(8), False),
        (compressed(4, weights={"num_bits": 4, "type": "float"}), False),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, True),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, False),
        ({"quant_method": "experts_int8"}, False),
        (GPTQ, False),
    ],
)
def test_fp8_is_told_from_other_types_of_eight_bits_whatever_the_method(
    scheme: dict[str, Any], fp8: bool, load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config({**load_config("qwen3_moe"), "quantization_config": scheme}).weights_are_fp8 is fp8


def fp8_group(**weights: Any) -> dict[str, Any]:
    return compressed(8, targets=["Linear"], weights={"num_bits": 8, "type": "float", **weights})


@pytest.mark.parametrize(
    ("scheme", "stored", "block"),
    [
        ({"quant_method": "fp8"}, "fp8", None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", (128, 128)),
        ({"quant_method": "fp8", "modules_to_not_convert": ["experts"]}, "dtype", None),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}, "other", None),
        (fp8_group(strategy="tensor"), "fp8", None),
        (fp8_group(strategy="channel"), "fp8", None),
        (fp8_group(strategy="block", block_structure=[128, 128]), "fp8", (128, 128)),
        (fp8_group(strategy="block", block_structure="128x64"), "fp8", (128, 64)),
        (fp8_group(strategy="group", group_size=32, scale_dtype="torch.uint8"), "other", None),
        (compressed(8), "other", None),
        (compressed(4), "other", None),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}, "other", None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", None),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "other", None),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "other", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "other", None),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {f"model.layers.{i}.mlp.experts": {"quant_algo": "FP8"} for i in range(48)},
            },
            "fp8",
            None,
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
         "fp8", None),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_group"}}},
         "other", None),
        (GPTQ, "int4", None),
        (GPTQ | {"bits": 8}, "other", None),
        (GPTQ | {"checkpoint_format": "marlin"}, "other", None),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "other", None),
        (GPTQ | {"dynamic": {"-:.*self_attn.*": {}}}, "int4", None),
        (GPTQ | {"dynamic": {"+:.*down.*": {"group_size": 32}}}, "other", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemv"}, "other", None),
        (compressed(4, weights={"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}), "other", None),
    ],
)  # fmt: skip
def test_expert_format_whatever_the_method(
    scheme: dict[str, Any], stored: str, block: tuple[int, int] | None, load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), "quantization_config": scheme})
    assert (spec.expert_format, spec.weight_block) == (stored, block)


def test_expert_format_where_nothing_is_quantised_or_experts_have_a_type_of_their_own(
    load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config(load_config("qwen3_moe")).expert_format == "dtype"
    assert inspect_config(load_config("deepseek_v4")).expert_format == "mxfp4", "in an FP8 checkpoint"
    assert inspect_config(load_config("llama")).expert_format == "none"


def test_a_scheme_beside_the_nested_model_is_found(load_config: Load, inspect_config: Inspect) -> None:
    assert inspect_config({**load_config("qwen3_vl_moe"), "quantization_config": GPTQ}).quant_method == "gptq"


def test_a_scheme_inside_the_nested_model_is_found(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_vl_moe")
    config["text_config"]["quantization_config"] = compressed(4)
    assert inspect_config(config).weight_bits == 4.5


def test_a_scheme_in_a_file_of_its_own_is_found(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config(load_config("qwen3_moe"), {"hf_quant_config.json": MODELOPT})
    assert (spec.quant_method, spec.weight_bits) == ("modelopt", 4.5)


def test_a_file_that_names_no_algorithm_quantises_nothing(load_config: Load, inspect_config: Inspect) -> None:
    nothing = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None}}
    assert inspect_config(load_config("qwen3_moe"), {"hf_quant_config.json": nothing}).quant_method is None


def test_a_scheme_under_compression_config_is_found(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), "compression_config": compressed(8)})
    assert (spec.quant_method, spec.weight_bits) == ("compressed-tensors", 8)


def test_experts_may_have_a_type_of_their_own_beside_the_scheme(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("deepseek_v4")
    assert config["expert_dtype"] == "fp4"
    spec = inspect_config(config)
    assert (spec.quant_method, spec.weight_bits) == ("fp8", 4.25)
    assert spec.expert_weight_bytes == pytest.approx(spec.expert_params * 4.25 / 8, rel=1e-9)


def test_layers_on_the_ignore_list_keep_their_dtype(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_moe")
    everything = inspect_config({**config, "quantization_config": compressed(4)})
    attention = {**compressed(4), "ignore": ["re:.*self_attn.*", "lm_head"]}
    some = inspect_config({**config, "quantization_config": attention})
    # 12 bits more for each attention weight, less the scale of 2 bytes for each group of 32.
    more = some.weight_bytes - everything.weight_bytes
    assert more == pytest.approx(everything.attention_params * (1.5 - 2 / 32), rel=1e-6)


def test_an_ignored_layer_alone_keeps_its_dtype(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_moe")
    whole = inspect_config({**config, "quantization_config": {"quant_method": "fp8"}})
    ignored = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    part = inspect_config({**config, "quantization_config": ignored})
    assert part.expert_weight_bytes - whole.expert_weight_bytes == whole.expert_params // 48


def test_gate_on_the_ignore_list_is_not_the_gate_projection(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("minimax_m2")
    ignored = {**config["quantization_config"], "modules_to_not_convert": ["gate", "e_score_correction_bias"]}
    spec = inspect_config({**config, "quantization_config": ignored})
    assert spec.weight_bytes == inspect_config(config).weight_bytes


def test_where_only_experts_are_quantised_the_rest_keeps_its_dtype(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config(load_config("gpt_oss"))
    assert (spec.quant_method, spec.weight_bits) == ("mxfp4", 4.25)
    assert spec.expert_weight_bytes == pytest.approx(spec.expert_params * (0.5 + 1 / 32), rel=1e-6)
    assert spec.weight_bytes - spec.expert_weight_bytes == pytest.approx(
        2 * (spec.total_params - spec.expert_params), rel=1e-6
    )


def test_the_first_group_whose_targets_match_says_the_bits(load_config: Load, inspect_config: Inspect) -> None:
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4}, "targets": ["re:.*experts.*"]},
            "group_1": {"weights": {"num_bits": 8}, "targets": ["Linear"]},
        },
    }
    spec = inspect_config({**load_config("qwen3_moe"), "quantization_config": scheme})
    assert spec.weight_bits == 4
    assert spec.expert_weight_bytes == spec.expert_params // 2


def test_layers_may_have_algorithms_of_their_own(load_config: Load, inspect_config: Inspect) -> None:
    layers = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(48)}
    layers |= {f"model.layers.{i}.self_attn.q_proj": {"quant_algo": "FP8"} for i in range(48)}
    scheme = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    }
    spec = inspect_config(load_config("qwen3_moe"), {"hf_quant_config.json": scheme})
    assert (spec.quant_method, spec.weight_bits) == ("modelopt", 4)


def test_unknown_method_is_a_warning_not_a_guess(load_config: Load, inspect_config: Inspect) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), "quantization_config": {"quant_method": "brand_new"}})
    assert (spec.quant_method, spec.weight_bits) == ("brand_new", 16)
    assert any("brand_new" in warning for warning in spec.warnings)


@pytest.mark.parametrize(
    ("entry", "name", "hit"),
    [
        ("lm_head", "lm_head", True),
        ("gate", "layers.3.mlp.gate", True),
        ("gate", "layers.3.mlp.gate_proj", False),
        ("model.layers.1.mlp", "layers.1.mlp.up_proj", True),
        ("model.layers.1.mlp", "layers.11.mlp.up_proj", False),
        ("language_model.model.layers.1.self_attn*", "layers.1.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "layers.7.self_attn", True),
        ("re:.*mlp.gate$", "layers.7.mlp.gate", True),
        ("re:.*mlp.gate$", "layers.7.mlp.gate_proj", False),
        ("*.mlp.shared_expert.*", "layers.7.mlp.shared_expert.up_proj", True),
    ],
)
def test_an_entry_matches_the_module_it_names_and_those_below_it(entry: str, name: str, hit: bool) -> None:
    assert ModulePatterns([entry]).match(name) is hit


def test_costly_expressions_are_not_tried() -> None:
    evil = ModulePatterns(["re:(a+)+$", "re:" + ".*a" * 30, "re:("])
    assert not evil.match("layers.0." + "a" * 200)
    assert len(evil.skipped) == 3


EXPERTS_AT_FOUR = [
    {"quant_method": "gptq", "bits": 8, "dynamic": {r"+:.*\.mlp\.experts\..*": {"bits": 4}}},
    {"quant_method": "gptq", "bits": 8, "dynamic": {r".*\.mlp\.experts\..*": {"bits": 4}}},
    {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
        "layer_quant_config": {"*mlp.experts*": {"weight": {"dtype": "fp4"}}},
    },
    {
        "quant_method": "auto-round",
        "bits": 8,
        "extra_config": {f"model.layers.{i}.mlp.experts": {"bits": 4} for i in range(48)},
    },
]


@pytest.mark.parametrize("scheme", EXPERTS_AT_FOUR)
def test_rules_for_single_modules_go_before_the_scheme_of_all(
    scheme: dict[str, Any], load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), "quantization_config": scheme})
    assert spec.weight_bits == 4
    assert spec.expert_weight_bytes == spec.expert_params // 2


def test_gptq_leaves_modules_out_by_a_negative_rule(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("qwen3_moe")
    whole, partial = (
        inspect_config({**config, "quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": rules}})
        for rules in ({}, {r"-:.*\.self_attn\..*": {}})
    )
    assert partial.weight_bytes - whole.weight_bytes == pytest.approx(whole.attention_params * 1.5, rel=1e-6)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ({"quant_method": "aqlm", "nbits_per_codebook": 16, "num_codebooks": 1, "in_group_size": 8}, 2),
        ({"quant_method": "quanto", "weights": "int4"}, 4),
    ],
)
def test_bits_of_methods_that_spell_them_out(
    scheme: dict[str, Any], bits: float, load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config({**load_config("llama"), "quantization_config": scheme}).weight_bits == bits
