from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.passes.registry import PASS_NAMES
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.verify import verify_plan


def verify(plan: Plan, *user_args: str) -> None:
    verify_plan(plan, pass_names=PASS_NAMES, user_args=ServeArguments(*user_args))


def with_decision(plan: Plan, name: str, **changes) -> Plan:
    decisions = tuple(
        dataclasses.replace(decision, **changes) if decision.pass_name == name else decision
        for decision in plan.decisions
    )
    return plan.replace(decisions=decisions)


def test_a_plan_from_the_planner_is_whole(plan):
    verify(plan)


def test_a_missing_or_repeated_decision_is_found(plan):
    for decisions in (plan.decisions[1:], (*plan.decisions, plan.decisions[0])):
        with pytest.raises(AssertionError, match="not the passes"):
            verify(plan.replace(decisions=decisions))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight_bytes", -1, "negative term"),
        ("kv_cache_bytes", 10**15, "bytes are unused"),
        ("kv_tokens", 10**12, "tokens take"),
        ("budget_bytes", 10**15, "budget"),
        ("fits", False, "does not fit"),
    ],
)
def test_memory_terms_that_do_not_add_up_are_found(plan, field, value, message):
    with pytest.raises(AssertionError, match=message):
        verify(plan.replace(memory=dataclasses.replace(plan.memory, **{field: value})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": ""}, "no reason"),
        ({"status": Status.REFUSED}, "but the wish"),
        ({"status": Status.OFF, "required": True}, "required"),
        ({"status": Status.OFF, "applier": Applier.PLUGIN}, "applied by"),
        ({"applier": Applier.NONE}, "no applier"),
        ({"vllm_args": ServeArguments("--never", "1")}, "not in serve_args"),
        ({"env": {"A": "b"}}, "not in"),
        ({"env": {"A=B": "b"}}, "environment"),
    ],
)
def test_a_decision_that_contradicts_itself_is_found(plan, changes, message):
    with pytest.raises(AssertionError, match=message):
        verify(with_decision(plan, "kv_cache", **changes))


def test_a_flag_given_twice_is_found(plan):
    with pytest.raises(AssertionError, match="twice"):
        verify(plan.replace(serve_args=plan.serve_args + ServeArguments("--max_num_seqs=5")))


def test_a_planned_flag_that_the_user_gives_too_is_found(plan):
    user = ServeArguments("--max-num-seqs", "5")
    changed = plan.replace(serve_args=plan.serve_args + user, plain_args=plan.plain_args + user)
    with pytest.raises(AssertionError, match="planned and given"):
        verify(changed, *user.words)
