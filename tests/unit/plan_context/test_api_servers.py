"""How many API servers each server of a plan has."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.plan.layout_table import layout_lines
from moe_optimizer.plan.plan import Plan
from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime
from tests.builders import gpus, made_plan, profile_with, qwen3_30b_a3b, software
from tests.unit.plan_context.planned_layouts import choice_of, planned


def api_servers(plan: Plan) -> int | None:
    found = {server.serve_args.count("--api-server-count") for server in (plan.group.servers if plan.group else [plan])}
    (count,) = found
    return count


@pytest.mark.parametrize("layout", ["tp8", "tp4x2"])
def test_each_server_gets_more_api_servers_where_one_would_be_busy_for_most_of_a_step(layout):
    plan, one = (planned(clients=512, layout=layout, vllm_args=given) for given in ((), ("--api-server-count", "1")))
    count = api_servers(plan)
    assert count is not None
    assert count > 1
    assert choice_of(plan).estimate.api_servers == count
    assert api_servers(one) == choice_of(one).estimate.api_servers == 1
    assert choice_of(plan).estimate.tokens_per_s > choice_of(one).estimate.tokens_per_s
    assert "API servers" in plan.decision("scheduler").reason


def test_what_bench_found_of_this_machines_api_servers_counts_is_shown_and_is_of_no_other_machine():
    found = FrontEndTime(clients=128, us_per_token=120.0, found="`bench`, 2026-11-28")
    slow = dataclasses.replace(software(), front_end=FrontEnd(times=(found,)))
    here = dataclasses.replace(gpus("h100_sxm", 8), origin="probed")
    plans = [
        made_plan(qwen3_30b_a3b(), hardware, clients=128, layout="tp8", software=installed)
        for hardware, installed in ((here, software()), (here, slow), (gpus("h100_sxm", 8), slow))
    ]
    shown = ["\n".join(layout_lines(choice_of(plan), 80)) for plan in plans]
    assert api_servers(plans[0]) == api_servers(plans[2])
    assert shown[0] == shown[2]
    assert (api_servers(plans[1]) or 1) > (api_servers(plans[0]) or 1)
    assert "; one for all would take 120 us a token (`bench`, 2026-11-28, 128 clients)" in " ".join(shown[1].split())
    one = made_plan(
        qwen3_30b_a3b(), here, clients=128, layout="tp8", software=slow, vllm_args=("--api-server-count", "1")
    )
    said = " ".join("\n".join(layout_lines(choice_of(one), 80)).split())
    assert "of a decode step, at 120 us a token (`bench`, 2026-11-28, 128 clients)" in said


def test_limits_that_more_api_servers_keep_are_kept_by_as_few_more_as_do():
    alone = planned(clients=64, layout="tp8")
    limit = 0.9 * choice_of(alone).estimate.ttft_ms
    plan = planned(clients=64, layout="tp8", ttft_ms=limit)
    assert api_servers(alone) is None
    assert choice_of(plan).estimate.ttft_ms <= limit
    assert api_servers(plan) == choice_of(plan).estimate.api_servers == 2
    assert "2 API servers, because with vLLM's own number the limits are not kept" in plan.decision("scheduler").reason
    one = planned(clients=64, layout="tp8", ttft_ms=limit, vllm_args=("--api-server-count", "1"))
    assert choice_of(one).estimate.ttft_ms > limit


@pytest.mark.parametrize(("layout", "clients"), [("tp8", 160), ("tp8", 1024), ("tp2x4", 768)])
def test_without_limits_more_api_servers_are_for_the_share_of_a_step_alone(layout, clients):
    """Two of tp2x4 are each busy for less than half as long as one would be: with fewer clients a token takes less."""
    plan = planned(clients=clients, layout=layout)
    assert choice_of(plan).estimate.api_servers > 1
    assert "more than 45% of a decode step" in plan.decision("scheduler").reason


ONE_API_SERVER = dataclasses.replace(software(), one_api_server="VLLM_ALLOW_RUNTIME_LORA_UPDATING")


@pytest.mark.parametrize(
    "changes",
    [
        {"clients": 8, "layout": "tp8"},
        {"clients": 512, "layout": "tp8", "vllm_args": ("--enable-elastic-ep",)},
        {"clients": 512, "layout": "tp8", "vllm_args": ("--enable-fault-tolerance",)},
        {"clients": 512, "layout": "tp8", "software": ONE_API_SERVER},
        {"clients": 512, "layout": "tp8", "profile": profile_with(passes={"scheduler": {"api_servers": "off"}})},
        # One for each copy, as vLLM starts them.
        {"clients": 512, "layout": "tp1dp8ep"},
        # On one GPU four gained nothing.
        {"clients": 512, "layout": "tp1x8"},
        # Of a server over machines only the first one takes the argument.
        {"clients": 2048, "layout": "tp8dp2ep", "num_nodes": 2, "num_gpus": 16},
    ],
)
def test_vllms_own_number_of_api_servers_is_left(changes):
    plan = planned(**changes)
    assert "--api-server-count" not in plan.serve_args
    assert choice_of(plan).estimate.api_servers == choice_of(plan).layout.data_parallel_size
