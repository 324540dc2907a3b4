"""FP8 on GPUs: vLLM converts."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.specs.quantity import Source
from tests.builders import (
    context,
    decided_by,
    dense_model,
    gpus,
    made_plan,
    mixtral_8x7b,
    profile_with,
    qwen3_30b_a3b,
    software,
)
from tests.unit.passes.fp8_decisions import ON, is_ignored, on_gpu, planned, quantization_config


def test_on_a_gpu_vllm_converts_experts_in_blocks_and_linears_in_channels():
    decision = on_gpu()
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    params = decision.params_as(Fp8Params)
    assert (params.expert_bits, params.linear_bits) == (8, 8)
    config = quantization_config(decision)
    assert (config["linear"], config["moe"]) == ("fp8_per_channel", "fp8_per_block")
    assert "no quality gate" in decision.reason


def test_the_granularity_is_vllms_scheme():
    config = quantization_config(on_gpu(settings={"granularity": "channel"}))
    assert (config["linear"], config["moe"]) == ("fp8_per_channel", "fp8_per_channel")


@pytest.mark.parametrize(("off", "left"), [("experts", "linear"), ("linears", "moe")])
def test_a_part_that_is_off_is_not_converted_and_said(off, left):
    decision = on_gpu(settings={off: "off"})
    assert set(quantization_config(decision)) == {left, "ignore"}
    assert any(re.match(rf"fp8\.{off} .*profile aggressive", why) for why in decision.rejected.values())


def test_a_dense_model_has_its_linears_converted():
    decision = on_gpu(dense_model())
    assert decision.value == "linears in FP8"
    assert "moe" not in quantization_config(decision)
    assert "experts" not in decision.rejected


@pytest.mark.parametrize(
    "router",
    [
        "model.layers.3.mlp.gate",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.11.mlp.router",
        "model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.mlp.text_experts_gate",
        "model.layers.3.mlp.v_router",
    ],
)
def test_routers_stay_whatever_the_profile_lists(router):
    assert is_ignored(quantization_config(on_gpu(settings={"keep_bf16_layers": []})), router)


def test_nothing_else_stays_unless_it_is_listed():
    config = quantization_config(on_gpu())
    for module in (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.experts",
        "mlp.shared_expert.down_proj",
    ):
        assert not is_ignored(config, f"model.layers.3.{module}")


@pytest.mark.parametrize(
    ("part", "kept", "converted"),
    [
        ("attention", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts"),
        ("shared_experts", "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.experts"),
        ("layers.3", "model.layers.3.mlp.experts", "model.layers.30.mlp.experts"),
        ("layers.3", "model.layers.3.self_attn.o_proj", "model.layers.13.self_attn.o_proj"),
    ],
)
def test_what_is_listed_stays_and_nothing_beside_it(part, kept, converted):
    decision = on_gpu(settings={"keep_bf16_layers": [part]})
    config = quantization_config(decision)
    assert is_ignored(config, kept)
    assert not is_ignored(config, converted)
    assert "profile aggressive" in decision.rejected[part]


def test_the_gain_is_the_least_time_of_a_step_and_modelled():
    gain = planned(qwen3_30b_a3b(), gpus("h100_sxm", 1)).decided["fp8"].gain
    assert gain is not None
    assert "decode step" in gain.metric
    assert gain.ratio.source is Source.MODELLED
    assert 1.0 < gain.ratio.value < 2.0


def test_the_gain_over_several_gpus_counts_their_all_reduces():
    gain = on_gpu().gain
    assert gain is not None
    assert gain.ratio.source is Source.MODELLED
    assert "96 all-reduces" in gain.ratio.ref


def test_the_gain_is_that_of_a_step_of_what_the_cache_holds():
    # 94 GB of weights in BF16 do not fit 85 GB; in FP8 they leave 32 GB, or 330 requests of 1536 tokens.
    decision = planned(mixtral_8x7b(), gpus("h100_sxm", 1)).decided["fp8"]
    assert decision.gain is not None
    sequences = re.search(r"(\d+) sequences at 1536 tokens", decision.gain.ratio.ref)
    assert sequences is not None
    assert 300 < int(sequences[1]) < 350
    assert decision.gain.ratio.value > 1.5
    assert any("bfloat16" in each for each in decision.evidence)


def test_auto_does_not_change_the_output_for_little():
    # A large batch waits for its cache, not for weights.
    profile = profile_with("aggressive", workload={"batch_size": 4096, "input_tokens": 8192, "output_tokens": 512})
    model, machine = qwen3_30b_a3b(), gpus("h100_sxm", 8)
    asked = decided_by(context(model, machine, profile, wishes=ON), "parallelism", "fp8").decided["fp8"]
    auto = decided_by(context(model, machine, profile), "parallelism", "fp8").decided["fp8"]
    assert (asked.status, auto.status) == (Status.ON, Status.OFF)
    assert re.search(r" 1\.0\dx .*too little", auto.reason)


def test_experts_alone_gain_less_than_all():
    every, experts = on_gpu().gain, on_gpu(settings={"linears": "off"}).gain
    assert every is not None
    assert experts is not None
    assert 1.0 < experts.ratio.value < every.ratio.value


def test_linears_that_are_no_whole_blocks_are_converted_too():
    # 64 heads of 72 on 8 GPUs are 576 wide.
    assert on_gpu(qwen3_30b_a3b(heads=64, head_dim=72)).params_as(Fp8Params).linear_bits == 8
    assert on_gpu(dataclasses.replace(dense_model(), hidden_size=4000)).status is Status.ON


def test_experts_that_vllm_fills_up_to_blocks_are_counted_and_warned_about():
    # 768 / 8 = 96, filled up to 128.
    decision = on_gpu()
    assert decision.params_as(Fp8Params).stored_expert_bits == pytest.approx(8 * 128 / 96)
    (warning,) = decision.warnings
    assert "1.33x" in warning
    profile = profile_with("aggressive", {"fp8": {"mode": "on"}})
    filled = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 8), profile, layout="tp8").memory
    whole = made_plan(qwen3_30b_a3b(width=1024), gpus("h100_sxm", 8), profile, layout="tp8").memory
    assert filled.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.001)


def test_a_gpu_without_fp8_units_is_refused_with_what_it_has():
    assert re.search("sm_89 .*found sm_80", on_gpu(name="a100_80gb").reason)


def test_float32_is_refused_on_a_gpu():
    assert on_gpu(dtype="float32").reason.endswith("found float32")


@pytest.mark.parametrize(
    ("asked", "installed", "used", "warned"),
    [
        ("auto", True, "vllm", ""),
        ("builtin", False, "builtin", ""),
        ("transformer_engine", True, "transformer_engine", ""),
        ("transformer_engine", False, "builtin", "builtin"),
    ],
)
def test_the_quantizer_on_gpus_is_the_one_asked_for_where_it_is_installed(asked, installed, used, warned):
    found = dataclasses.replace(software(), transformer_engine=installed)
    decision = on_gpu(settings={"quantizer": asked}, software=found)
    assert decision.params_as(Fp8Params).quantizer == used
    assert f"quantizer: {used}" in decision.evidence
    assert decision.applier is (Applier.FLAGS if used == "vllm" else Applier.PLUGIN)
    assert decision.vllm_args  # vLLM converts in every case
    about = [warning for warning in decision.warnings if warning.startswith("fp8.quantizer")]
    assert len(about) == bool(warned)
    assert all(warned in warning for warning in about)


def test_per_channel_vllm_converts_with_its_own_quantizer():
    decision = on_gpu(settings={"quantizer": "builtin", "granularity": "channel"})
    assert decision.params_as(Fp8Params).quantizer == "vllm"
    assert [warning.partition(": ")[0] for warning in decision.warnings] == ["fp8.quantizer builtin"]
