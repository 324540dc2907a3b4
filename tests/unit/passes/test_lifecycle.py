"""What holds for every pass, whatever it decides."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.passes.registry import PASS_NAMES, all_passes
from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan_context.context import PlanContext
from tests.builders import asking, context, cpu_machine, decided_by, dense_model, gpus, qwen3_30b_a3b, tiny_moe

CONTEXTS = {
    "one H100": lambda: context(qwen3_30b_a3b(), gpus("h100_sxm", 1)),
    "eight H100": lambda: context(qwen3_30b_a3b(), gpus("h100_sxm", 8)),
    "one A100": lambda: context(qwen3_30b_a3b(), gpus("a100_80gb", 1)),
    "CPU": lambda: context(tiny_moe(), cpu_machine()),
    "dense on CPU": lambda: context(dense_model(), cpu_machine(gib=64)),
}


def decide(name: str, ctx: PlanContext, wish: Wish) -> Decision:
    ctx = asking(ctx, wishes={name: (wish, f"flag --test-{name}")})
    return decided_by(ctx, *PASS_NAMES[: PASS_NAMES.index(name) + 1]).decided[name]


@pytest.mark.parametrize("machine", CONTEXTS)
@pytest.mark.parametrize("name", PASS_NAMES)
def test_off_means_off_without_arguments_or_environment(name, machine):
    decision = decide(name, CONTEXTS[machine](), Wish.OFF)
    assert decision.status is Status.OFF
    assert decision.vllm_args.words == ()
    assert decision.env == {}
    assert f"--test-{name}" in decision.reason
    assert decision.wish_origin == f"flag --test-{name}"


@pytest.mark.parametrize("machine", CONTEXTS)
@pytest.mark.parametrize("name", PASS_NAMES)
def test_only_a_wish_by_name_is_refused(name, machine):
    assert decide(name, CONTEXTS[machine](), Wish.AUTO).status is not Status.REFUSED


@pytest.mark.parametrize("machine", CONTEXTS)
@pytest.mark.parametrize("name", PASS_NAMES)
def test_a_pass_that_is_not_on_asks_for_nothing(name, machine):
    decision = decide(name, CONTEXTS[machine](), Wish.ON)
    assert decision.reason
    if decision.status is not Status.ON:
        assert decision.vllm_args.words == ()
        assert decision.env == {}


@pytest.mark.parametrize("machine", CONTEXTS)
@pytest.mark.parametrize("wish", Wish)
@pytest.mark.parametrize("name", PASS_NAMES)
def test_whatever_is_wished_of_a_pass_the_later_ones_can_decide(name, wish, machine):
    ctx = asking(CONTEXTS[machine](), wishes={name: (wish, "test")})
    assert tuple(decided_by(ctx, *PASS_NAMES).decided) == PASS_NAMES


@pytest.mark.parametrize("each", all_passes(), ids=lambda each: each.name)
def test_a_pass_states_title_limits_and_what_it_does(each):
    assert each.title
    assert each.limits
    assert type(each).__doc__


def test_a_flag_goes_before_the_profile():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 1))
    assert ctx.wish("fp8") == (Wish.OFF, "profile balanced")
    ctx = asking(ctx, wishes={"fp8": (Wish.ON, "flag --enable-fp8")})
    assert ctx.wish("fp8") == (Wish.ON, "flag --enable-fp8")


def test_fp32_on_request_doubles_the_weights_of_a_bf16_checkpoint():
    ctx = context(tiny_moe(), cpu_machine())
    in_fp32 = dataclasses.replace(ctx, dtype="float32")
    assert in_fp32.memory().weight_bytes == pytest.approx(2 * ctx.memory().weight_bytes, rel=0.001)
