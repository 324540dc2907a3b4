"""Where vLLM and transformers would build different models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]


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
