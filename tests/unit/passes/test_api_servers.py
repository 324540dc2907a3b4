"""How many API servers a plan has."""

from __future__ import annotations

from typing import Any

import pytest

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.layout_choice import LayoutEstimate
from moe_optimizer.plan.plan import Plan
from moe_optimizer.planner import make_plan
from moe_optimizer.profiles.schema import Profile
from tests.builders import cpu_machine, gpus, profile_with, qwen3_30b_a3b, request, tiny_moe

FLAG = "--api-server-count"
MANY = {"clients": 512, "batch_size": 512, "input_tokens": 512, "output_tokens": 128}


AUTO = {"mode": "auto"}


def plan(layout: str = "tp4", **asked: Any) -> Plan:
    changes: dict[str, Any] = {**MANY, "profile": profile_with(passes={"api_servers": AUTO}), **asked}
    return make_plan(request(qwen3_30b_a3b(), gpus("h200", 4), layout=layout, **changes))


def estimate(found: Plan) -> LayoutEstimate:
    assert found.layouts is not None
    return found.layouts.estimate


def test_slices_of_many_clients_get_several_and_are_predicted_with_them():
    many, one = plan(), plan(wishes=resolve_wishes([], ["api-servers"]))
    decision = many.decision("api_servers")
    count = many.serve_args.count(FLAG)
    assert decision.status is Status.ON
    assert count is not None
    assert 1 < count <= 4
    assert estimate(many).api_servers == count
    assert estimate(many).tokens_per_s > 1.3 * estimate(one).tokens_per_s
    assert FLAG not in one.serve_args
    assert estimate(one).front_end_share == 1


def test_what_one_can_do_is_left_to_one():
    found = plan(clients=16)
    assert found.decision("api_servers").status is Status.OFF
    assert FLAG not in found.serve_args
    assert estimate(found).api_servers == 1


def test_copies_have_one_each_without_asking():
    found = plan("tp1dp4ep")
    assert estimate(found).api_servers == 4
    assert FLAG not in found.serve_args


def test_each_server_behind_a_router_has_its_own():
    found = plan("tp2x2", clients=1024, batch_size=512)
    assert found.group is not None
    counts = [server.serve_args.count(FLAG) for server in found.group.servers]
    assert counts == [estimate(found).api_servers] * 2
    assert estimate(found).api_servers > 1


def test_the_users_own_number_is_predicted_and_stays_where_it_is():
    found = plan(vllm_args=(FLAG, "2"))
    assert found.serve_args.words.count(FLAG) == 1
    assert found.serve_args.count(FLAG) == 2
    assert estimate(found).api_servers == 2
    assert found.decision("api_servers").status is Status.ON


def test_the_users_own_number_is_predicted_where_the_pass_is_off_too():
    found = plan(vllm_args=(FLAG, "2"), profile=profile_with())
    assert (found.serve_args.count(FLAG), estimate(found).api_servers) == (2, 2)


@pytest.mark.parametrize("name", ["conservative", "balanced", "aggressive", "throughput"])
def test_no_shipped_profile_takes_several_by_itself(name):
    assert estimate(plan(profile=profile_with(name))).api_servers == 1


def test_a_profile_that_does_not_name_it_takes_no_several():
    profile = Profile(name="own", description="names no pass")
    assert estimate(plan(profile=profile)).api_servers == 1


def test_a_profile_says_how_many():
    found = plan(clients=1, profile=profile_with(passes={"api_servers": {**AUTO, "count": 3}}))
    assert found.serve_args.count(FLAG) == 3


def test_asked_for_by_flag_there_are_two_where_one_would_do():
    found = plan(clients=1, wishes=resolve_wishes(["api-servers"], []))
    assert found.serve_args.count(FLAG) == 2


@pytest.mark.parametrize("against", ["--enable-elastic-ep", "--enable-lora"])
def test_arguments_that_need_one_keep_it(against):
    found = plan(vllm_args=(against,))
    assert FLAG not in found.serve_args
    assert against in found.decision("api_servers").reason
    assert estimate(found).api_servers == 1


def test_the_cpu_build_has_one():
    found = make_plan(request(tiny_moe(), cpu_machine()))
    assert found.decision("api_servers").status is Status.OFF
