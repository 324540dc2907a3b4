"""Whole servers behind a router: when, how many, with which devices."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.plan.plan import Plan
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    gpus,
    made_plan,
    mixtral_8x7b,
    profile_with,
    qwen3_30b_a3b,
    tiny_moe,
)

ON = resolve_wishes(["replicas"], [])


def on_cpu(wishes: Any = ON, **changes: Any) -> Plan:
    return made_plan(tiny_moe(), cpu_machine(cores=4), wishes=wishes, **changes)


def on_gpus(count: int, wishes: Any = ON, **changes: Any) -> Plan:
    return made_plan(qwen3_30b_a3b(), gpus("h100_sxm", count), wishes=wishes, **changes)


def counted(count: int):
    return profile_with(passes={"replicas": {"mode": "on", "count": count}})


@pytest.mark.parametrize(
    ("model", "hardware", "changes", "why"),
    [
        (tiny_moe, gpus("h100_sxm", 1), {}, " 2 GPUs, .*found 1"),
        (tiny_moe, gpus("h100_sxm", 2), {"profile": counted(4)}, " 4 GPUs"),
        (tiny_moe, cpu_machine(cores=1), {}, " 2 CPU cores"),
        (tiny_moe, cpu_machine(cores=4), {"pinned": {"--tensor-parallel-size": "2"}}, "tensor parallelism of 2"),
        (tiny_moe, gpus("h100_sxm", 2), {"pinned": {"--ssl-certfile": "c"}}, "plain HTTP"),
        (deepseek_v3, gpus("h200", 8), {}, "no part of 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(model, hardware, changes, why):
    decision = decided_by(context(model(), hardware, wishes=ON, **changes), "replicas").decided["replicas"]
    assert decision.status is Status.REFUSED
    assert re.search(why, decision.reason)


def test_nobody_gets_several_servers_without_asking_by_name():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 8), wishes={"replicas": (Wish.AUTO, "profile")})
    after = decided_by(ctx, "replicas")
    assert after.decided["replicas"].status is Status.OFF
    assert (after.num_servers, after.num_gpus) == (1, 8)


def test_beside_disaggregation_by_profile_it_is_refused():
    profile = profile_with(passes={"disaggregation": {"mode": "on"}, "replicas": {"mode": "on"}})
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 4), profile)
    assert plan.decision("replicas").status is Status.REFUSED
    assert "disaggregation already divides" in plan.decision("replicas").reason


def test_a_model_that_one_gpu_holds_gets_a_server_on_each_and_every_other_pass_plans_for_that():
    plan = on_gpus(4, layout="tp1x4")
    assert plan.group is not None
    assert plan.decision("replicas").applier is Applier.SERVERS
    assert plan.decision("parallelism").value == "TP=1"
    assert [(server.name, server.gpus) for server in plan.group.servers] == [
        (f"replica-{index}", (index,)) for index in range(4)
    ]
    assert plan.num_gpus == 4
    assert plan.memory == made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1)).memory


def test_a_model_that_needs_two_gpus_gets_a_server_on_every_two():
    plan = made_plan(mixtral_8x7b(), gpus("h100_sxm", 4), wishes=ON)
    assert plan.group is not None
    assert [server.gpus for server in plan.group.servers] == [(0, 1), (2, 3)]
    assert plan.parallelism.tensor_parallel_size == 2


def test_the_users_own_slices_say_how_many_gpus_a_server_has():
    plan = on_gpus(4, vllm_args=("--tensor-parallel-size", "2"))
    assert plan.group is not None
    assert [server.gpus for server in plan.group.servers] == [(0, 1), (2, 3)]


def test_a_count_goes_before_what_would_fit_and_a_gpu_left_over_is_said():
    plan = on_gpus(5, profile=counted(2), wishes={})
    assert plan.group is not None
    assert [server.gpus for server in plan.group.servers] == [(0, 1), (2, 3)]
    assert any("1 of 5 GPUs" in warning for warning in plan.warnings)


def test_the_router_has_the_address_and_knows_every_server():
    plan = on_cpu(host="0.0.0.0", port=9000, profile=counted(4), wishes={})
    assert plan.group is not None
    router = plan.group.router_args
    assert (router.value("--host"), router.value("--port")) == ("0.0.0.0", "9000")
    urls = [f"http://127.0.0.1:{server.serve_args.value('--port')}" for server in plan.group.servers]
    assert router.words[: len(urls) + 1] == ("--worker-urls", *urls)
    ports = [server.serve_args.value("--port") for server in plan.group.servers]
    assert len({*ports, "9000", router.value("--prometheus-port")}) == 6


def test_the_servers_differ_in_address_only():
    plan = on_gpus(2, vllm_args=("--seed", "7"))
    assert plan.group is not None
    for server in plan.group.servers:
        assert server.serve_args.value("--seed") == "7"
        assert set(plan.serve_args.words) - set(server.serve_args.words) <= {"8000"}


def test_on_gpus_the_plan_says_that_slices_were_faster_with_the_figures_of_the_record():
    decision = on_gpus(2).decision("replicas")
    (record,) = decision.evidence
    sides = json.loads((Path(__file__).parents[3] / record).read_text())["sides"]
    longer = []
    for clients in ("1", "16", "128"):
        took, before = (sides[side]["loads"][clients]["tpot_ms_median"] for side in ("replicas", "slices"))
        longer.append(round(100 * (took / before - 1)))
    one, some, many = longer
    words = f"median time per output token {one} % longer for 1 client, {some} % for 16, {many} % for 128"
    assert words in decision.rejected["auto"]


def test_on_the_cpu_the_plan_claims_no_measurement():
    decision = on_cpu().decision("replicas")
    assert decision.evidence == ()
    assert "no record" in decision.rejected["auto"]


def test_a_tier_in_host_memory_is_shared_between_the_servers():
    machine = dataclasses.replace(gpus("h100_sxm", 4), cpu=cpu_machine(gib=64).cpu)
    wishes = resolve_wishes(["replicas", "kv-tiering"], [])
    # Half of the host's memory is for all of them.
    plan = made_plan(qwen3_30b_a3b(), machine, wishes=wishes, layout="tp1x4")
    assert plan.decision("kv_cache").params_as(KvCacheParams).offload_gib == 64 // 2 // 4
