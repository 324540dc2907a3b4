from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.ops.gate_topk import MAX_TOKENS
from moe_optimizer.passes.flash_dmoe import fused_router
from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.software import SoftwareSpec
from tests.builders import cpu_machine, gpus, profile_with, qwen3_30b_a3b, tiny_moe
from tests.unit.passes.flash_dmoe.test_flash_dmoe import H200_SHAPE, decide, decide_on_h200, measured, speeds

ROOT = Path(__file__).resolve().parents[4]


def with_the_launch(found: SoftwareSpec) -> SoftwareSpec:
    kernels = dataclasses.replace(found.kernels, cuda_ops=("fused_experts", "gate_topk"))
    return dataclasses.replace(found, kernels=kernels)


def asked(setting: str = "on", **changes: Any) -> Decision:
    profile = profile_with(passes={"flash_dmoe": {"fused_router": setting}})
    fields = {"software": with_the_launch(measured(speeds())), "profile": profile}
    return decide_on_h200(**(fields | changes))


def on_h100(setting: str = "auto", *, count: int = 1, **changes: Any) -> Decision:
    machine = gpus("h100_sxm", count)
    assert machine.gpu is not None
    shape = dataclasses.replace(H200_SHAPE, num_experts=H200_SHAPE.num_experts // count)
    found = with_the_launch(measured(speeds(device=machine.gpu.name, shape=shape)))
    profile = profile_with(passes={"flash_dmoe": {"fused_router": setting}})
    return decide(qwen3_30b_a3b(), machine, software=found, profile=profile, **changes)


def most(decision: Decision) -> int:
    return decision.params_as(FlashDmoeParams).fused_router


def test_where_the_launch_was_measured_to_be_faster_it_chooses_the_experts_by_itself():
    decision = on_h100()
    assert most(decision) == MAX_TOKENS
    assert "measured to be faster on NVIDIA H100" in decision.reason
    assert set(fused_router.MEASURED.values()) <= set(decision.evidence)
    assert most(on_h100("off")) == 0


def test_where_nothing_was_measured_vllm_chooses_the_experts():
    assert most(asked("auto")) == 0


def test_where_vllm_exchanges_logits_before_it_chooses_the_choice_is_vllms():
    decision = on_h100(count=2, pinned={"--data-parallel-size": "2"})
    assert decision.status is Status.ON
    assert decision.params_as(FlashDmoeParams).kernel == "cuda"
    assert most(decision) == 0


@pytest.mark.parametrize(("place", "record"), fused_router.MEASURED.items())
def test_the_record_has_it_faster_at_every_number_of_tokens(place, record):
    facts = json.loads((ROOT / record).read_text(encoding="utf-8"))
    gpu, experts, hidden = place
    assert facts["environment"]["device"] == gpu
    cases = [case for case in facts["cases"] if case["what"] == "layer" and case["tokens"] <= MAX_TOKENS]
    assert max(case["tokens"] for case in cases) == MAX_TOKENS
    for case in cases:
        assert (case["shape"]["experts"], case["shape"]["hidden"]) == (experts, hidden)
        times = {name: statistics.median(samples) for name, samples in case["samples_us"].items()}
        ours = min(time for name, time in times.items() if "gate_topk" in name)
        assert ours < min(time for name, time in times.items() if "F.linear" in name)


def test_where_it_is_asked_for_the_plan_says_up_to_how_many_tokens_and_that_it_is_not_measured():
    decision = asked()
    assert decision.status is Status.ON
    assert most(decision) == fused_router.MAX_TOKENS == MAX_TOKENS
    assert f"up to {MAX_TOKENS} tokens" in decision.reason
    assert "not measured" in decision.reason
    assert decision.params_as(FlashDmoeParams).dispatch == asked("off").params_as(FlashDmoeParams).dispatch


def test_a_build_without_it_leaves_the_experts_ours_with_a_warning():
    decision = asked(software=measured(speeds()))
    assert decision.status is Status.ON
    assert most(decision) == 0
    assert "gate_topk" in decision.warnings[0]


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
