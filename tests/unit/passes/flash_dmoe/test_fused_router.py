from __future__ import annotations

import dataclasses
from typing import Any

from moe_optimizer.ops.gate_topk import MAX_TOKENS
from moe_optimizer.passes.flash_dmoe import fused_router
from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from tests.builders import cpu_machine, gpus, profile_with, qwen3_30b_a3b, tiny_moe
from tests.unit.passes.flash_dmoe.test_flash_dmoe import decide, decide_on_h200, measured, speeds


def asked(setting: str = "on", **changes: Any) -> Decision:
    found = measured(speeds())
    kernels = dataclasses.replace(found.kernels, cuda_ops=("fused_experts", "gate_topk"))
    profile = profile_with(passes={"flash_dmoe": {"fused_router": setting}})
    fields = {"software": dataclasses.replace(found, kernels=kernels), "profile": profile}
    return decide_on_h200(**(fields | changes))


def most(decision: Decision) -> int:
    return decision.params_as(FlashDmoeParams).fused_router


def test_the_launch_chooses_the_experts_unless_the_profile_leaves_it_to_vllm():
    assert most(asked("auto")) == MAX_TOKENS
    assert most(asked("off")) == 0


def test_on_several_gpus_where_no_server_was_measured_it_has_to_be_asked_for():
    whole = speeds()
    half = dataclasses.replace(whole.shape, intermediate_size=whole.shape.intermediate_size // 2)
    software = measured(dataclasses.replace(whole, shape=half))
    kernels = dataclasses.replace(software.kernels, cuda_ops=("fused_experts", "gate_topk"))
    for setting, expected in (("auto", 0), ("on", MAX_TOKENS)):
        passes = {"flash_dmoe": {"fused_router": setting}, "parallelism": {"tensor_parallel_size": 2}}
        decision = decide(
            qwen3_30b_a3b(),
            gpus("h200", 2),
            software=dataclasses.replace(software, kernels=kernels),
            profile=profile_with(passes=passes),
        )
        assert decision.status is Status.ON
        assert most(decision) == expected


def test_the_plan_says_up_to_how_many_tokens_and_by_which_record():
    decision = asked()
    assert decision.status is Status.ON
    assert most(decision) == fused_router.MAX_TOKENS == MAX_TOKENS
    assert f"up to {MAX_TOKENS} tokens" in decision.reason
    assert any("one_client" in each for each in decision.evidence)
    assert decision.params_as(FlashDmoeParams).dispatch == asked("off").params_as(FlashDmoeParams).dispatch


def test_a_model_that_multiplies_its_gate_itself_does_not_get_it_and_who_asked_is_told():
    other = dataclasses.replace(qwen3_30b_a3b(), model_type="mixtral")
    for setting, warnings in (("auto", 0), ("on", 1)):
        decision = asked(setting, model=other)
        assert decision.status is Status.ON
        assert most(decision) == 0
        assert len(decision.warnings) == warnings
    assert "mixtral" in asked("on", model=other).warnings[0]


def test_a_build_without_it_leaves_the_experts_ours_with_a_warning_if_it_was_asked_for():
    decision = asked(software=measured(speeds()))
    assert decision.status is Status.ON
    assert most(decision) == 0
    assert "gate_topk" in decision.warnings[0]
    assert not asked("auto", software=measured(speeds())).warnings


def test_experts_of_vllm_have_a_gate_of_vllm():
    decision = asked(software=measured())
    assert decision.status is Status.OFF
    assert most(decision) == 0
    assert not decision.warnings


def test_on_a_cpu_nothing_changes():
    profile = profile_with(passes={"flash_dmoe": {"fused_router": "on"}})
    wishes = {"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")}
    assert decide(tiny_moe(), cpu_machine(), wishes=wishes, profile=profile) == decide(
        tiny_moe(), cpu_machine(), wishes=wishes
    )
