from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_optimizer.passes.expert_load import ExpertLoad
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan_context.context import PlanContext
from tests.builders import context, cpu_machine, decided_by, dense_model, gpus, qwen3_30b_a3b, tiny_moe

ROOT = Path(__file__).parents[3]


def decide(ctx: PlanContext, *, wish: Wish = Wish.AUTO, **changes: object) -> Decision:
    ctx = dataclasses.replace(ctx, wishes={"expert_load": (wish, "flag --test")}, **changes)  # pyright: ignore[reportArgumentType]
    return ExpertLoad().decide(decided_by(ctx, "parallelism"))


def test_on_the_cpu_it_counts_and_names_the_record_of_its_cost():
    decision = decide(context(tiny_moe(), cpu_machine()))
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.vllm_args == ()
    (record,) = decision.evidence
    assert (ROOT / record).is_file()


def test_on_a_gpu_it_counts_only_when_asked_for_because_the_cost_is_not_measured():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 1))
    decision = decide(ctx)
    assert (decision.status, decision.applier) == (Status.OFF, Applier.NONE)
    assert "not measured" in decision.reason
    wished = decide(ctx, wish=Wish.ON)
    assert (wished.status, wished.applier, wished.evidence) == (Status.ON, Applier.PLUGIN, ())
    assert "hundredth" not in wished.reason


def test_a_dense_model_has_no_experts_to_count():
    assert "no experts" in decide(context(dense_model(), cpu_machine(gib=64)), wish=Wish.ON).reason


def test_data_parallelism_is_refused():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 2))
    decision = decide(ctx, wish=Wish.ON, pinned={"--data-parallel-size": "2", "--tensor-parallel-size": "1"})
    assert decision.status is Status.REFUSED
    assert "data parallelism (2)" in decision.reason


@pytest.mark.parametrize("flag", ["--enable-dbo", "--enable-return-routed-experts"])
def test_arguments_that_take_its_place_are_named(flag: str):
    ctx = context(tiny_moe(), cpu_machine())
    assert decide(ctx, wish=Wish.ON, pinned={flag: ""}).reason.startswith(flag)
    assert decide(ctx, pinned={flag: "false"}).status is Status.ON
