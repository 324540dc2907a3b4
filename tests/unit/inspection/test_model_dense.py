"""Dense models that look like mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]


def assert_dense(spec: ModelSpec) -> None:
    assert not spec.is_moe
    assert (spec.num_experts, spec.top_k, spec.num_shared_experts, spec.moe_intermediate_size) == (0, 0, 0, 0)
    assert spec.num_moe_layers == 0
    assert spec.expert_params == 0
    assert spec.active_params == spec.total_params


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granitemoehybrid_dense", {}),
        ("granitemoe", {"num_local_experts": 0}),
        ("jamba", {"num_experts": 1}),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"mlp_only_layers": list(range(48))}),
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


def test_expert_count_of_a_dense_architecture_is_ignored_with_a_warning(
    load_config: Load, inspect_config: Inspect
) -> None:
    spec = inspect_config({**load_config("llama"), "num_local_experts": 8, "num_experts_per_tok": 2})
    assert_dense(spec)
    assert any("num_local_experts" in warning for warning in spec.warnings)
