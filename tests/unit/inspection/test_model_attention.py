"""What attention a configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]


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


@pytest.mark.parametrize(("name", "chunked"), [("llama4", True), ("gpt_oss", False)])
def test_chunks_of_attention_are_told_from_sliding_windows(
    name: str, chunked: bool, load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config(load_config(name)).attention.chunked is chunked


@pytest.mark.parametrize(
    ("name", "changes", "normalised"),
    [
        ("qwen3_moe", {}, True),
        ("glm4_moe", {"use_qk_norm": True}, True),
        ("glm4_moe", {"use_qk_norm": False}, False),
        ("olmoe", {}, False),
        ("mixtral", {}, False),
        ("deepseek_v3", {}, False),
    ],
)
def test_norms_of_query_and_key_heads_are_told_from_none_and_from_norms_of_the_whole_width(
    name: str, changes: dict[str, Any], normalised: bool, load_config: Load, inspect_config: Inspect
) -> None:
    assert inspect_config(load_config(name) | changes).attention.has_head_norms is normalised


def test_layers_that_borrow_a_cache_add_none(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("hunyuan")
    shared = inspect_config({**config, "use_cla": True, "cla_share_factor": 2})
    assert shared.kv_bytes_per_token * 2 == inspect_config(config).kv_bytes_per_token


def test_a_latent_family_may_have_ordinary_attention(load_config: Load, inspect_config: Inspect) -> None:
    zero = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "kv_lora_rank": None, "use_mla": False}
    spec = inspect_config({**load_config("deepseek_v2"), **zero})
    assert spec.attention.kind == "mha"
    assert spec.kv_bytes_per_token == 27 * 2 * 2048 * 2


def test_key_value_heads_that_do_not_divide_the_query_heads_are_refused(
    load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=r"num_key_value_heads:.* 5,.* 32 "):
        inspect_config({**load_config("qwen3_moe"), "num_key_value_heads": 5})


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
