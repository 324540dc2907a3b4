"""FP8 wherever it runs: checkpoints, layers that stay, what it changes in other plans."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from moe_optimizer.errors import InputError, RequiredNotAppliedError, UnsupportedError
from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.specs.layer_sensitivity import LayerSensitivity, LayerSensitivityFile
from tests.builders import (
    cpu_machine,
    deepseek_v3,
    gpt_oss_120b,
    gpus,
    made_plan,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    tiny_moe,
)
from tests.unit.passes.fp8_decisions import ON, WITHOUT_FLASH, is_ignored, on_cpu, on_gpu, planned, quantization_config


def test_an_fp8_checkpoint_is_served_as_it_is_and_no_gain_is_claimed():
    decision = on_gpu(deepseek_v3())
    assert decision.status is Status.ON
    assert "checkpoint" in decision.value
    assert not decision.vllm_args.arguments
    assert decision.gain is None


def test_a_checkpoint_quantised_otherwise_is_refused():
    decision = on_gpu(gpt_oss_120b())
    assert decision.status is Status.REFUSED
    assert decision.reason.endswith(": mxfp4, 4.25 bits")


def test_switched_off_an_fp8_checkpoint_is_said_to_stay_fp8():
    decision = planned(qwen3_30b_a3b_fp8(), gpus("h100_sxm"), wishes={"fp8": (Wish.OFF, "test")}).decided["fp8"]
    assert decision.status is Status.OFF
    assert "checkpoint is FP8" in decision.reason


def test_an_fp8_checkpoint_in_the_files_of_another_method_is_one_too():
    model = dataclasses.replace(qwen3_30b_a3b_fp8(), quant_method="compressed-tensors", weight_block=None)
    decision = planned(model, gpus("h100_sxm"), wishes=ON).decided["fp8"]
    assert (decision.status, decision.vllm_args.words) == (Status.ON, ())
    assert "checkpoint" in decision.value


@pytest.mark.parametrize(
    ("block", "isa", "found"),
    [((128, 128), ("avx512f",), "without amx_tile"), (None, ("amx_tile",), "another kind")],
)
def test_the_cpu_build_gets_no_fp8_checkpoint_with_which_it_ends(block, isa, found):
    model = dataclasses.replace(qwen3_30b_a3b_fp8(), weight_block=block)
    with pytest.raises(UnsupportedError, match=f"{found}; "):
        made_plan(model, cpu_machine(gib=256, isa=isa))


def test_the_cpu_build_gets_an_fp8_checkpoint_that_its_kernels_read():
    plan = made_plan(qwen3_30b_a3b_fp8(), cpu_machine(gib=256, isa=("amx_tile",)), wishes=ON)
    assert plan.decision("fp8").status is Status.ON


@pytest.mark.parametrize("flag", ["--quantization", "--quantization-config"])
def test_the_users_own_quantisation_goes_before(flag):
    decision = on_gpu(pinned={flag: "fp8_per_tensor"})
    assert (decision.status, decision.vllm_args.words) == (Status.REFUSED, ())
    assert decision.reason.startswith(f"{flag} fp8_per_tensor ")


def test_a_profile_with_both_parts_off_asks_for_nothing():
    off = {"experts": "off", "linears": "off"}
    assert re.search("linears.*profile aggressive", on_gpu(settings=off, wishes={}).reason)
    assert re.search("experts .*profile aggressive", on_cpu(settings={"experts": "off"}, wishes={}).reason)
    assert on_cpu(settings={"experts": "off"}, wishes={}).status is Status.OFF


def test_asked_for_by_name_with_its_parts_off_it_is_refused():
    for decision in (on_gpu(settings={"experts": "off", "linears": "off"}), on_cpu(settings={"experts": "off"})):
        assert (decision.status, decision.vllm_args.words) == (Status.REFUSED, ())


def test_a_layer_that_the_model_does_not_have_is_an_error():
    with pytest.raises(InputError, match=r"layers\.4, .*layers\.3: tiny-moe"):
        on_cpu(settings={"keep_bf16_layers": ["layers.4"]})


def sensitivity(errors: dict[int, float], **changes: Any) -> LayerSensitivityFile:
    fields: dict[str, Any] = {"model": "tiny-moe", "weights": "fp8_block", "tokens": 4096, "errors": errors}
    return LayerSensitivityFile(path="s.json", measured=LayerSensitivity(**(fields | changes)))


MEASURED = {0: 0.02, 1: 0.09, 2: 0.03, 3: 0.081}


def test_layers_that_were_measured_over_the_budget_stay():
    decision = on_cpu(fp8_sensitivity=sensitivity(MEASURED))
    assert decision.params_as(Fp8Params).excluded_layers == (1, 3)
    assert decision.params_as(Fp8Params).max_layer_error is None  # decided here, not once more while loading
    assert any(re.match(r"s\.json:.* 0\.020 to 0\.090.*4096", each) for each in decision.evidence)


def test_measured_and_named_layers_stay_together():
    settings: dict[str, Any] = {"keep_bf16_layers": ["layers.0"], "max_layer_error": 0.085}
    assert on_cpu(settings=settings, fp8_sensitivity=sensitivity(MEASURED)).params_as(Fp8Params).excluded_layers == (
        0,
        1,
    )
    settings["max_layer_error"] = None
    decision = on_cpu(settings=settings, fp8_sensitivity=sensitivity(MEASURED))
    assert decision.params_as(Fp8Params).excluded_layers == (0,)


def test_on_gpus_measured_layers_are_left_out_of_vllms_conversion():
    errors = dict.fromkeys(range(48), 0.03) | {7: 0.2}
    decision = on_gpu(name="h200", fp8_sensitivity=sensitivity(errors, model="Qwen3-30B-A3B"))
    config = quantization_config(decision)
    assert is_ignored(config, "model.layers.7.mlp.experts")
    assert not is_ignored(config, "model.layers.8.mlp.experts")


@pytest.mark.parametrize(
    ("changes", "errors", "message"),
    [
        ({"model": "other"}, MEASURED, "s.json: model: got other"),
        ({"weights": "fp8_channel"}, MEASURED, "weights: got fp8_channel"),
        ({}, {0: 0.1}, "layers: got [0], expected [0, 1, 2, 3]"),
    ],
)
def test_a_measurement_of_something_else_is_an_error(changes, errors, message):
    with pytest.raises(InputError) as caught:
        on_cpu(fp8_sensitivity=sensitivity(errors, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("profile", ["conservative", "balanced", "single_h100"])
def test_profiles_that_keep_the_models_numbers_have_it_off(profile):
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm"), profile)
    assert plan.decision("fp8").status is Status.OFF
    assert "--quantization" not in plan.serve_args


@pytest.mark.parametrize("machine", [gpus("h200"), cpu_machine(gib=256)], ids=["gpu", "cpu"])
def test_the_memory_plan_counts_the_converted_weights(machine):
    model = qwen3_30b_a3b()
    off = made_plan(model, machine, wishes={})
    on = made_plan(model, machine, wishes=ON)
    converted = model.expert_params
    if machine.gpu is not None:
        converted += model.attention_params + model.dense_params + model.shared_expert_params
    saved = off.memory.weight_bytes - on.memory.weight_bytes
    assert saved == pytest.approx(converted, rel=0.01)  # one byte of two for each weight, less the scales


def weights(**settings: Any) -> int:
    profile = profile_with("aggressive", {"fp8": {"mode": "on", **settings}})
    return made_plan(MIXED, gpus("h100_sxm"), profile).memory.weight_bytes


MIXED = deepseek_v3(bytes_per_weight=2.0, layers=4, dense_layers=1, quant_method=None, experts=16, max_position=4096)
"""With dense and shared feed-forward parts, and a layer without experts."""


@pytest.mark.parametrize(
    ("kept", "params"),
    [
        (["attention"], MIXED.attention_params),
        (["shared_experts"], MIXED.shared_expert_params),
        (["layers.0"], MIXED.attention_params / 4 + MIXED.dense_params),
        (
            ["layers.1", "layers.3"],
            MIXED.attention_params / 2 + (MIXED.shared_expert_params + MIXED.expert_params) * 2 / 3,
        ),
    ],
    ids=str,
)
def test_the_memory_plan_counts_what_stays_at_its_own_size(kept, params):
    assert weights(keep_bf16_layers=kept) - weights() == pytest.approx(params, rel=0.01)


def test_layers_that_stay_gain_nothing():
    gain = on_cpu(settings={"keep_bf16_layers": ["layers.0", "layers.3"]}).gain
    assert gain is not None
    assert gain.ratio.value == pytest.approx(16 / 12, rel=0.001)


@pytest.mark.parametrize("decide", [on_cpu, lambda **changes: on_gpu(tiny_moe(), **changes)])
def test_where_every_layer_stays_nothing_is_promised(decide):
    decision = decide(settings={"keep_bf16_layers": [f"layers.{layer}" for layer in range(4)]}, wishes=ON)
    assert decision.status is Status.REFUSED
    assert re.search("keep_bf16_layers.*max_layer_error", decision.reason)


def test_required_without_our_kernel_is_no_plan():
    profile = profile_with(passes={"flash_dmoe": {"mode": "off"}})
    with pytest.raises(RequiredNotAppliedError, match=r"fp8 is required.*kernel"):
        made_plan(tiny_moe(), cpu_machine(), profile, required=frozenset({"fp8"}))


def test_asked_for_and_our_kernel_switched_off_is_a_contradiction_on_the_cpu():
    with pytest.raises(InputError, match="--enable-fp8 and --disable-flash-dmoe "):
        made_plan(tiny_moe(), cpu_machine(), wishes=WITHOUT_FLASH)
    assert made_plan(qwen3_30b_a3b(), gpus("h200"), wishes=WITHOUT_FLASH).decision("fp8").status is Status.ON
