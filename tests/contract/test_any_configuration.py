"""Whatever config.json says, the command ends with a consistent result or a sentence, never with a bug.

Published configurations, and small ones of several families that fit every machine, with a few fields removed, taken
from another configuration, or replaced by anything JSON can hold, at any depth.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.cli.main import main
from tests.examples import examples

COMMON = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "hidden_act": "silu", "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: tuple[dict[str, Any], ...] = (
    {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
     "num_experts_per_tok": 2, "sliding_window": None, **COMMON},
    {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 16,
     "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
     "moe_layer_freq": 1, "n_group": 4, "topk_group": 2, "kv_lora_rank": 64, "q_lora_rank": 128,
     "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_nextn_predict_layers": 1,
     "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, **COMMON},
    {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"],
     "text_config": {"model_type": "qwen3_vl_moe_text", "num_experts": 16, "num_experts_per_tok": 4,
                     "moe_intermediate_size": 256, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 64,
                     **COMMON}},
    {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_experts": 16, "num_experts_per_tok": 2,
     "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 3, "attn_layer_offset": 1,
     "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 32, **COMMON},
    {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 16,
     "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128,
     "layer_types": ["sliding_attention", "full_attention"] * 3,
     "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, **COMMON},
    {"model_type": "hunyuan_v1_moe", "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 16,
     "moe_topk": [4] * 6, "moe_intermediate_size": [256] * 6, "num_shared_expert": [1] * 6, "head_dim": 64, **COMMON},
    {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"],
     "text_config": {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1,
                     "interleave_moe_layer_step": 2, "intermediate_size_mlp": 2048, "head_dim": 64, **COMMON}},
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **COMMON},
)  # fmt: skip
CONFIGS = Path(__file__).resolve().parents[1] / "data" / "model_configs"
PUBLISHED = tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted(CONFIGS.glob("*.json")))
OK, BAD_INPUT, UNSUPPORTED = 0, 2, 3

NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**40, 2**70, -(2**40), 10**400]),
    st.floats(), st.sampled_from([0.0, 0.5, 1e308, 1e-300]),
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=8),
    st.sampled_from(["", "silu", "\x1b[2J", "0,1", "fp8", "full_attention", "sparse", "M*-E", "1,2,x", "attention"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def places(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a configuration that holds a value, objects and arrays included."""
    if path:
        yield path
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def replace(config: Any, path: tuple[Any, ...], value: Any, *, remove: bool) -> None:
    """Put `value` at `path`, or take away what is there; nothing when an earlier change removed the place."""
    for key in path[:-1]:
        try:
            config = config[key]
        except (KeyError, IndexError, TypeError):
            return
    with contextlib.suppress(KeyError, IndexError, TypeError):
        if remove:
            del config[path[-1]]
        else:
            config[path[-1]] = value


@st.composite
def changed_configs(draw: st.DrawFn) -> bytes:
    bases = st.sampled_from(FAMILIES) | st.sampled_from(PUBLISHED)
    config, other = copy.deepcopy(draw(bases)), draw(bases)
    every = sorted(places(config), key=repr)
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            replace(config, draw(st.sampled_from(every)), draw(VALUES), remove=draw(st.booleans()))
        else:
            key = draw(st.sampled_from(sorted(other)))
            config[key] = copy.deepcopy(other[key])
    return json.dumps(config).encode()


NO_CONFIGS = st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | VALUES.map(json.dumps).map(str.encode)


def run_on(config: bytes, command: list[str]) -> tuple[int, str]:
    """Return the exit code and what was printed, held to what every answer must be."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*command, "--model", folder, "--json"])
    message = err.getvalue()
    assert code in (OK, BAD_INPUT, UNSUPPORTED), message
    assert "\x1b" not in message
    if code != OK:
        assert out.getvalue() == ""
        assert message.startswith("error: ")
        # Between the error and its hint a failing plan keeps its warnings, a line each.
        others = [line for line in message.splitlines()[1:] if line and not line.startswith(("hint: ", "warning: "))]
        assert others == []
    return code, out.getvalue()


INSPECT, PLAN = ["inspect"], ["plan", "--hardware", "h200", "--gpus", "8"]


@settings(
    max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(changed=changed_configs())
def test_any_configuration_is_counted_consistently_or_refused_in_a_sentence(changed: bytes) -> None:
    code, printed = run_on(changed, INSPECT)
    if code == OK:
        model = json.loads(printed)
        assert 0 <= model["active_params"] <= model["total_params"]
        assert model["top_k"] <= model["num_experts"] + 10_000
        assert model["is_moe"] == (model["num_experts"] > 0)


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(changed=changed_configs())
def test_any_configuration_gives_a_plan_or_a_sentence(changed: bytes) -> None:
    code, printed = run_on(changed, PLAN)
    if code == OK:
        json.loads(printed)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=NO_CONFIGS)
def test_what_is_no_configuration_is_refused(content: bytes) -> None:
    assert run_on(content, INSPECT)[0] != OK


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_the_unchanged_configurations_have_a_result(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["plan", "--hardware", "h200", "--model", str(tmp_path), "--json"]) == OK
