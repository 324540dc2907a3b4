"""DeepGEMM keeps the scales of FP8 blocks on Hopper, unless the checkpoint or the user says otherwise."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.plan.decision import Applier, Status, Wish
from tests.builders import gpus, made_plan, qwen3_30b_a3b_fp8, software
from tests.unit.passes.fp8_decisions import on_cpu, on_gpu, planned

VARIABLE = "VLLM_USE_DEEP_GEMM_E8M0"
CHECKPOINT = qwen3_30b_a3b_fp8()


def test_a_checkpoint_of_blocks_is_served_with_its_own_scales_and_the_plan_says_so() -> None:
    decision = on_gpu(CHECKPOINT)
    assert (decision.status, decision.applier, decision.env) == (Status.ON, Applier.FLAGS, {VARIABLE: "0"})
    assert VARIABLE in decision.reason
    plan = made_plan(CHECKPOINT, gpus("h100_sxm", 1))
    assert plan.serve_env[VARIABLE] == "0"


def test_switched_off_it_is_served_with_them_too() -> None:
    off = planned(CHECKPOINT, gpus("h100_sxm"), wishes={"fp8": (Wish.OFF, "test")}).decided["fp8"]
    assert (off.status, off.env) == (Status.OFF, {VARIABLE: "0"})


def test_weights_that_vllm_converts_in_blocks_keep_theirs_and_channels_have_none() -> None:
    assert on_gpu(settings={"granularity": "block"}).env == {VARIABLE: "0"}
    assert on_gpu(settings={"granularity": "channel"}).env == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": dataclasses.replace(CHECKPOINT, power_of_two_scales=True)},
        {"model": dataclasses.replace(CHECKPOINT, weight_block=None, fp8_scales="channel")},
        {"model": CHECKPOINT, "name": "b200"},
        {"model": CHECKPOINT, "software": dataclasses.replace(software("cuda"), deep_gemm_e8m0="1")},
        {"model": CHECKPOINT, "inside_vllm": True},
    ],
    ids=["made with powers of two", "no blocks", "no Hopper", "set by the user", "runs already"],
)
def test_where_it_is_not_ours_to_say_the_variable_stays_as_it_is(changes) -> None:
    decision = on_gpu(**changes)
    assert (decision.status, decision.env) == (Status.ON, {})
    assert VARIABLE not in decision.reason


def test_the_cpu_build_has_no_such_variable() -> None:
    assert on_cpu().env == {}
