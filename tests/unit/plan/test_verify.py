from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.passes.registry import PASS_NAMES
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.verify import verify_plan
from tests.unit.plan import several_machines


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


def with_server(plan: Plan, named: str, /, **changes) -> Plan:
    assert plan.group is not None
    servers = tuple(
        dataclasses.replace(server, **changes) if server.name == named else server for server in plan.group.servers
    )
    return plan.replace(group=dataclasses.replace(plan.group, servers=servers))


@pytest.fixture(scope="module")
def apart() -> Plan:
    return several_machines.plan("apart")


def test_servers_of_several_machines_are_whole(apart):
    verify(apart)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("prefill-0", {"machine": 1}, "port|GPUs"),
        ("decode-1", {"machine": 2}, "on no machine of 2"),
        ("decode-1", {"gpus": (4, 5, 6, 7)}, "machine 1 have GPUs"),
        ("decode-1", {"gpus": ()}, "machine 1 have GPUs"),
        ("decode-2", {"gpus": (4, 5)}, "16 GPUs are used"),
        ("decode-2", {"name": "decode-1"}, "servers"),
    ],
)
def test_a_server_at_the_wrong_place_is_found(apart, name, changes, message):
    with pytest.raises(AssertionError, match=message):
        verify(with_server(apart, name, **changes))


def test_a_machine_without_a_server_is_found(apart):
    with pytest.raises(AssertionError, match="has no server"):
        verify(apart.replace(num_nodes=3))


def test_a_server_that_the_router_does_not_know_is_found(apart):
    (server,) = (each for each in apart.group.servers if each.name == "decode-2")
    moved = server.serve_args.overridden_by(ServeArguments("--port", "8009"))
    with pytest.raises(AssertionError, match="0 times of http://ADDRESS_1:8009"):
        verify(with_server(apart, "decode-2", serve_args=moved))
