"""The counts against two independent sources: transformers' classes built without memory, and published figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.specs.model import ModelSpec

CONFIGS = Path(__file__).parents[2] / "data" / "model_configs"
TRANSFORMERS_TYPE = {
    "kimi_k2": "deepseek_v3",
    "minimax_text_01": None,
    "minimax_m3": "minimax_m3_vl_text",
    "qwen3_omni_moe_text": "qwen3_moe",
}
"""Where the checkpoint's model_type is not the class's; None: the class reads other fields."""

NOT_IN_TRANSFORMERS = ("arctic", "bailing_moe", "grok-1", "mimo", "step3_text", "step3p7", "longcat_flash", "jetmoe")
"""Own code, vLLM only, or (longcat_flash) built with weights for experts that have none."""


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    for name in ("thinker_config", "text_config"):
        inner = config.get(name)
        if inner is not None:
            config = {**inner, **{key: config[key] for key in ("tie_word_embeddings",) if key in config}}
    return config


def transformers_type(config: dict[str, Any]) -> str | None:
    model_type = language_model(config).get("model_type", "longcat_flash")
    if model_type in NOT_IN_TRANSFORMERS:
        return None
    return TRANSFORMERS_TYPE.get(model_type, model_type)


def comparable() -> list[str]:
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    return [name for name in names if transformers_type(json.loads((CONFIGS / f"{name}.json").read_text())) is not None]


def parameters_by_transformers(config: dict[str, Any]) -> int:
    """Parameters of the class that transformers builds, on the meta device: no memory, no weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

    model_type = transformers_type(config)
    assert model_type is not None
    inner = language_model(config)
    ignored = ("quantization_config", "auto_map", "model_type", "rope_scaling")
    built = CONFIG_MAPPING[model_type].from_dict({key: value for key, value in inner.items() if key not in ignored})
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(built, attn_implementation="eager")
        except ValueError:  # a text model without a head of its own inside a multi-modal one
            model = AutoModel.from_config(built, attn_implementation="eager")
    total = sum(parameter.numel() for parameter in model.parameters())
    if model.get_output_embeddings() is None and not inner.get("tie_word_embeddings", built.tie_word_embeddings):
        total += built.vocab_size * built.hidden_size
    return total


@pytest.mark.parametrize("name", comparable())
def test_total_is_what_transformers_builds(
    name: str, load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    config = load_config(name)
    assert inspect_config(config).total_params == parameters_by_transformers(config)


# Billions of all and of active parameters as we count them: the embedding and the head of a token are both active.
COUNTED = {
    "mixtral": (46.70, 12.88),
    "mixtral_large": (140.62, 39.15),
    "qwen3_moe": (30.53, 3.35),
    "qwen3_moe_large": (235.09, 22.19),
    "qwen3_next": (79.67, 3.87),
    "deepseek_v3": (671.03, 37.55),
    "deepseek_v2": (15.71, 2.66),
    "kimi_k2": (1026.41, 32.86),
    "gpt_oss": (116.83, 5.71),
    "llama4": (107.77, 17.17),
    "llama4_interleaved": (400.71, 17.18),
    "glm4_moe": (106.85, 13.42),
    "dbrx": (131.60, 36.47),
    "jamba": (51.57, 12.11),
    "olmoe": (6.92, 1.28),
    "phimoe": (41.87, 6.64),
    "arctic": (478.59, 17.32),
    "hunyuan": (80.39, 12.75),
    "minimax_text_01": (456.09, 48.40),
    "ernie4_5_moe": (21.83, 3.35),
    "dots1": (142.77, 14.02),
    "bailing_moe": (16.80, 2.75),
    "bailing_moe_v2": (16.26, 1.43),
    "lfm2_moe": (8.34, 1.56),
    "grok_1": (315.68, 83.76),
    "longcat_flash": (560.66, 32.18),
    "step3_vl": (316.30, 38.84),
    "jetmoe": (8.52, 2.33),
    "kimi_linear": (49.12, 3.48),
    "granitemoehybrid": (32.21, 8.80),
    "nemotron_h_moe": (31.58, 3.58),
    "nemotron_h_latent": (120.67, 12.77),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_counts_stay(
    name: str, load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    spec = inspect_config(load_config(name))
    got = (round(spec.total_params / 1e9, 2), round(spec.active_params / 1e9, 2))
    assert got == pytest.approx(COUNTED[name], abs=0.0101)


# Billions as the publishers print them (model cards, papers): total, active, and which of the two matrices of the
# vocabulary their active figure leaves out: none, the embedding (a row of it is read, not multiplied), or both.
PUBLISHED = {
    "mixtral": ("46.7", "12.9", "none"),
    "mixtral_large": ("141", "39", "none"),
    "qwen3_moe": ("30.5", "3.3", "none"),
    "qwen3_moe_large": ("235", "22", "none"),
    "qwen3_next": ("80", "3", "both"),
    "deepseek_v3": ("671", "37", "embedding"),
    "deepseek_v2": ("15.7", "2.4", "embedding"),
    "kimi_k2": ("1000", "32", "embedding"),
    "gpt_oss": ("116.8", "5.1", "embedding"),
    "glm4_moe": ("106", "12", "both"),
    "dbrx": ("132", "36", "none"),
    "jamba": ("52", "12", "none"),
    "olmoe": ("6.9", "1.3", "none"),
    "phimoe": ("42", "6.6", "none"),
    "arctic": ("480", "17", "none"),
    "minimax_text_01": ("456", "45.9", "both"),
    "dots1": ("142", "14", "none"),
    "bailing_moe": ("16.8", "2.75", "none"),
    "kimi_linear": ("48", "3", "embedding"),
}


def units(text: str) -> float:
    """The size of a printed figure's last digit."""
    return 10.0 ** -len(text.partition(".")[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_publishers_but_for_the_matrices_that_they_leave_out(
    name: str, load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    spec = inspect_config(load_config(name))
    total, active, left_out = PUBLISHED[name]
    matrices = {"none": 0, "embedding": spec.embedding_params, "both": spec.embedding_params + spec.lm_head_params}
    # Totals are often printed as round figures; an active one is rounded, or cut in the middle of a unit.
    assert spec.total_params / 1e9 == pytest.approx(float(total), rel=0.03)
    assert (spec.active_params - matrices[left_out]) / 1e9 == pytest.approx(float(active), abs=0.54 * units(active))


# num_experts, top_k, shared experts, expert width, layers, expert layers, cache bytes per token
SHAPES = {
    "mixtral": (8, 2, 0, 14336, 32, 32, 131072),
    "qwen2_moe": (60, 4, 1, 1408, 24, 24, 196608),
    "qwen3_moe": (128, 8, 0, 768, 48, 48, 98304),
    "qwen3_next": (512, 10, 1, 512, 48, 48, 24576),
    "qwen3_5_moe": (256, 8, 1, 512, 40, 40, 20480),
    "qwen3_vl_moe": (128, 8, 0, 768, 48, 48, 98304),
    "qwen3_omni_moe": (128, 8, 0, 768, 48, 48, 98304),
    "deepseek_v2": (64, 6, 2, 1408, 27, 26, 31104),
    "deepseek_v3": (256, 8, 1, 2048, 61, 58, 70272),
    "kimi_k2": (384, 8, 1, 2048, 61, 60, 70272),
    "kimi_linear": (256, 8, 1, 1024, 27, 26, 8064),
    "glm4_moe": (128, 8, 1, 1408, 46, 45, 188416),
    "glm_moe_dsa": (256, 8, 1, 2048, 78, 75, 89856),
    "gpt_oss": (128, 4, 0, 2880, 36, 36, 73728),
    "llama4": (16, 1, 1, 8192, 48, 48, 196608),
    "llama4_interleaved": (128, 1, 1, 8192, 48, 24, 196608),
    "dbrx": (16, 4, 0, 10752, 40, 40, 163840),
    "jamba": (16, 2, 0, 14336, 32, 16, 16384),
    "hunyuan": (64, 8, 1, 3072, 32, 32, 131072),
    "ernie4_5_moe": (64, 6, 2, 1536, 28, 27, 57344),
    "minimax_text_01": (32, 2, 0, 9216, 80, 80, 40960),
    "longcat_flash": (512, 12, 0, 2048, 28, 28, 64512),
    "nemotron_h_moe": (128, 6, 1, 1856, 52, 23, 6144),
    "nemotron_h_unnumbered": (512, 22, 1, 5120, 108, 48, 12288),
    "step3_vl": (48, 3, 1, 5120, 61, 56, 62464),
    "lfm2_moe": (32, 4, 0, 1792, 24, 22, 12288),
    "bailing_moe": (64, 6, 2, 1408, 28, 28, 57344),
    "afmoe": (128, 8, 1, 1024, 32, 30, 65536),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_experts_of_a_published_model_have_their_published_shapes(
    name: str, load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    spec = inspect_config(load_config(name))
    got = (spec.num_experts, spec.top_k, spec.num_shared_experts, spec.moe_intermediate_size)
    assert (*got, spec.num_layers, spec.num_moe_layers, spec.kv_bytes_per_token) == SHAPES[name]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_parts_make_up_the_total(
    name: str, load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    spec = inspect_config(load_config(name))
    parts = spec.expert_params + spec.shared_expert_params + spec.router_params + spec.attention_params
    parts += spec.dense_params + spec.embedding_params + spec.lm_head_params
    rest = spec.total_params - parts  # norms, latent projections, residual streams
    assert 0 < rest < 0.04 * spec.total_params
    assert 0 < spec.active_params <= spec.total_params
    assert spec.is_moe == (spec.num_moe_layers > 0) == (spec.expert_params > 0) == (spec.num_experts > 0)
    assert 0 < spec.expert_weight_bytes < spec.weight_bytes or not spec.is_moe
