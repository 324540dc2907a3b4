"""Prefill and decode in separate servers: when, with which devices, and how the servers differ."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from moe_optimizer.errors import GoalMissedError, InputError, UnsupportedError
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.plan.plan import Plan
from tests.builders import context, cpu_machine, decided_by, gpus, made_plan, profile_with, qwen3_30b_a3b, tiny_moe

ON = resolve_wishes(["disaggregation"], [])
NUMBERS = {"mode": "on", "prefill_servers": 1, "decode_servers": 2}
THREE_SERVERS = profile_with(passes={"disaggregation": NUMBERS})
TWO_PROCESSES = profile_with(passes={"parallelism": {"tensor_parallel_size": 2}})


def on_cpu(wishes: Any = ON, **changes: Any) -> Plan:
    return made_plan(tiny_moe(), cpu_machine(cores=4), wishes=wishes, **changes)


def on_gpus(count: int, wishes: Any = ON, **changes: Any) -> Plan:
    return made_plan(qwen3_30b_a3b(), gpus("h100_sxm", count), wishes=wishes, **changes)


@pytest.mark.parametrize(
    ("hardware", "changes", "why"),
    [
        (gpus("h100_sxm", 1), {}, " 2 GPUs, .*found 1"),
        (gpus("h100_sxm", 2), {"profile": THREE_SERVERS}, " 3 GPUs, .*found 2"),
        (cpu_machine(cores=1), {}, " 2 CPU cores"),
        (cpu_machine(cores=2), {"profile": THREE_SERVERS}, " 3 CPU cores"),
        (cpu_machine(cores=4), {"profile": TWO_PROCESSES}, "tensor parallelism of 2"),
        (cpu_machine(cores=4), {"pinned": {"--tensor-parallel-size": "2"}}, "tensor parallelism of 2"),
        (cpu_machine(cores=4), {"pinned": {"--data-parallel-size": "2"}}, "data parallelism of 2"),
        (gpus("h100_sxm", 2), {"pinned": {"--kv-transfer-config": "{}"}}, "--kv-transfer-config is given"),
        (gpus("h100_sxm", 2), {"pinned": {"--kv-offloading-size": "8"}}, "the place of .*; --enable-kv-tiering"),
        (gpus("h100_sxm", 2), {"pinned": {"--ssl-certfile": "c"}}, "plain HTTP"),
        (gpus("h100_sxm", 2), {"pinned": {"--speculative-config": "{}"}}, "not run with disaggregation"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(hardware, changes, why):
    ctx = context(tiny_moe(), hardware, wishes=ON, **changes)
    decision = decided_by(ctx, "disaggregation").decided["disaggregation"]
    assert decision.status is Status.REFUSED
    assert re.search(why, decision.reason)


@pytest.mark.parametrize("argument", ["--ssl-certfile c", "--kv-transfer-config {}"])
def test_limits_that_only_a_split_keeps_are_missed_with_an_argument_that_its_servers_cannot_have(argument):
    asked = {"clients": 512, "input_tokens": 8000, "output_tokens": 200, "tpot_ms": 25.0, "profile": "aggressive"}
    machine = gpus("h100_sxm", 8)
    assert made_plan(qwen3_30b_a3b(), machine, **asked).group is not None
    with pytest.raises(GoalMissedError):
        made_plan(qwen3_30b_a3b(), machine, **asked, vllm_args=tuple(argument.split()))


def test_a_size_that_is_more_than_a_servers_share_says_how_many_servers_share_the_gpus():
    with pytest.raises(UnsupportedError, match=r"expected at most 4 GPUs, the share of each of 2 "):
        on_gpus(8, vllm_args=("--tensor-parallel-size", "8"))


def placed(plan: Plan) -> dict[str, int]:
    assert plan.group is not None
    return {server.name: server.machine for server in plan.group.servers}


def over_machines(layout: str | None = None, machines: int = 2, **changes: Any) -> Plan:
    asked = {"wishes": ON} if layout is None else {"layout": layout, "wishes": {}}
    return on_gpus(8, num_nodes=machines, num_gpus=8 * machines, **asked, **changes)


@pytest.mark.parametrize(
    ("layout", "machines", "prefill", "decode"),
    [
        ("tp8p1d1", 2, [0], [1]),
        ("tp4p2d2", 2, [0, 1], [0, 1]),
        ("tp4p1d3", 2, [0], [0, 1, 1]),
        ("tp4p1d2", 2, [0], [0, 1]),
        ("tp2p4d4", 2, [0, 0, 1, 1], [0, 0, 1, 1]),
        ("tp4p2d4", 3, [0, 0], [1, 1, 2, 2]),
    ],
)
def test_machines_are_alike_where_both_kinds_divide_by_them_and_filled_in_order_where_not(
    layout, machines, prefill, decode
):
    machine_of = placed(over_machines(layout, machines))
    assert [machine for name, machine in machine_of.items() if name.startswith("prefill")] == prefill
    assert [machine for name, machine in machine_of.items() if name.startswith("decode")] == decode


@pytest.mark.parametrize("layout", [None, "tp1p1d15"])
def test_servers_over_machines_have_gpus_and_ports_of_their_own_machine(layout):
    plan = over_machines(layout)
    assert plan.group is not None
    assert plan.num_gpus == 16
    for machine in (0, 1):
        servers = [server for server in plan.group.servers if server.machine == machine]
        assert sorted(gpu for server in servers for gpu in server.gpus) == list(range(8))
        ports = [server.serve_args.value("--port") for server in servers]
        ports += [server.serve_env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in servers]
        ports += ["8000", plan.group.router_args.value("--prometheus-port")]
        assert len(set(ports)) == len(ports)
        address = {f"ADDRESS_{machine}"}
        assert {server.serve_args.value("--host") for server in servers} == address
        assert {server.serve_env["VLLM_NIXL_SIDE_CHANNEL_HOST"] for server in servers} == address


def test_ports_do_not_run_out_with_the_number_of_machines():
    assert len(placed(over_machines("tp1p64d448", machines=64))) == 512


def test_what_was_not_run_over_several_machines_is_said():
    warnings = over_machines("tp8p1d1").warnings
    assert any("over several machines" in warning and "not run" in warning for warning in warnings)
    assert not any("several machines" in warning for warning in on_gpus(8).warnings)


def test_a_machine_without_a_server_is_refused():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 8), wishes=ON, num_nodes=4, profile=THREE_SERVERS)
    decision = decided_by(ctx, "disaggregation").decided["disaggregation"]
    assert decision.status is Status.REFUSED
    assert "4 machines" in decision.reason


def test_gpus_that_a_split_leaves_idle_on_the_last_machine_are_said():
    plan = over_machines("tp4p1d2")
    assert plan.num_gpus == 12
    assert any("4 of 16 GPUs idle" in warning for warning in plan.warnings)


def test_a_tier_counts_the_servers_of_one_machine():
    tier = resolve_wishes(["kv-tiering"], [])
    one = on_gpus(8, layout="tp4p1d1", wishes=tier)
    two = on_gpus(8, layout="tp4p2d2", wishes=tier, num_nodes=2, num_gpus=16)
    one_gib, two_gib = (plan.decision("kv_cache").params_as(KvCacheParams).offload_gib for plan in (one, two))
    assert one_gib == two_gib
    assert one_gib


def test_a_model_with_a_state_beside_its_cache_is_refused_on_the_cpu():
    ctx = context(qwen3_30b_a3b(state_bytes_per_sequence=4096), cpu_machine(cores=4), wishes=ON)
    assert "keeps a state" in decided_by(ctx, "disaggregation").decided["disaggregation"].reason


def test_nobody_gets_several_servers_without_asking_by_name():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 8), wishes={"disaggregation": (Wish.AUTO, "profile")})
    after = decided_by(ctx, "disaggregation")
    assert after.decided["disaggregation"].status is Status.OFF
    assert (after.num_servers, after.num_gpus) == (1, 8)
    assert made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2)).group is None


def test_each_server_has_gpus_of_its_own_and_every_other_pass_plans_for_those():
    plan = on_gpus(8, layout="tp2p1d3")
    assert plan.group is not None
    assert plan.decision("disaggregation").applier is Applier.SERVERS
    assert plan.parallelism.tensor_parallel_size == 2
    assert [server.name for server in plan.group.servers] == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert [server.gpus for server in plan.group.servers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert plan.num_gpus == 8
    assert plan.memory == made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2)).memory


def test_a_gpu_that_is_left_over_is_said():
    plan = on_gpus(3, profile=profile_with(passes={"disaggregation": NUMBERS | {"decode_servers": 1}}))
    assert any("1 of 3 GPUs" in warning for warning in plan.warnings)


def test_without_gpus_a_profile_says_how_many_servers_read_and_how_many_write():
    plan = on_cpu(profile=THREE_SERVERS)
    assert plan.group is not None
    assert [server.name for server in plan.group.servers] == ["prefill-0", "decode-0", "decode-1"]
    assert [server.serve_env["VLLM_CPU_OMP_THREADS_BIND"] for server in plan.group.servers] == ["0-1", "2", "3"]
    alone = made_plan(tiny_moe(), cpu_machine(cores=4))
    assert plan.memory.total_bytes == alone.memory.total_bytes // 3


@pytest.mark.parametrize("count", [4, 8])
def test_no_two_servers_take_the_same_port(count):
    plan = on_gpus(count, layout=f"tp1p1d{count - 1}")
    assert plan.group is not None
    servers, router = plan.group.servers, plan.group.router_args
    ports = [server.serve_args.value("--port") for server in servers] + [
        server.serve_env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in servers
    ]
    assert len({*ports, router.value("--port"), router.value("--prometheus-port")}) == 2 * count + 2


def test_copies_in_a_server_leave_each_other_room_for_side_channels():
    plan = on_gpus(8, layout="tp1dp4epp1d1")
    assert plan.group is not None
    first, second = (int(server.serve_env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for server in plan.group.servers)
    # Each copy takes the port of the server plus its own number.
    assert second - first >= plan.parallelism.data_parallel_size


def test_side_channels_need_ports_too():
    with pytest.raises(InputError, match="--port: got 65000, but "):
        on_gpus(8, layout="tp1p1d7", port=65000)


def test_the_router_has_the_address_and_the_servers_are_for_it_alone():
    plan = on_cpu(host="0.0.0.0", port=9000, profile=THREE_SERVERS)
    assert plan.group is not None
    router = plan.group.router_args
    assert (router.value("--host"), router.value("--port")) == ("0.0.0.0", "9000")
    assert {server.serve_args.value("--host") for server in plan.group.servers} == {"127.0.0.1"}
    ports = [server.serve_args.value("--port") for server in plan.group.servers]
    given = [(each.flag, each.value) for each in router.arguments if each.flag in ("--prefill", "--decode")]
    parts = ("--prefill", "--decode", "--decode")
    assert given == [(part, f"http://127.0.0.1:{port}") for part, port in zip(parts, ports, strict=True)]
    assert len({*ports, "9000", router.value("--prometheus-port")}) == 5


def test_the_servers_differ_in_address_and_part_only():
    plan = on_gpus(2, vllm_args=("--seed", "7"))
    assert plan.group is not None
    for server in plan.group.servers:
        common = [word for word in plan.serve_args.words if word in server.serve_args.words]
        assert server.serve_args.value("--seed") == "7"
        assert set(plan.serve_args.words) - set(common) <= {"8000"}
    parts = [json.loads(s.serve_args.value("--kv-transfer-config") or "") for s in plan.group.servers]
    assert [part["kv_role"] for part in parts] == ["kv_producer", "kv_consumer"]
    assert {part["kv_connector"] for part in parts} == {"NixlConnector"}
    assert len({server.serve_env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in plan.group.servers}) == 2


def test_a_tier_stands_beside_the_connector_between_the_servers_and_after_it():
    plan = on_gpus(2, wishes=resolve_wishes(["disaggregation", "kv-tiering"], []))
    alone = on_gpus(2)
    assert plan.group is not None
    assert alone.group is not None
    size = plan.decision("kv_cache").params_as(KvCacheParams).offload_gib
    assert size
    for server, without in zip(plan.group.servers, alone.group.servers, strict=True):
        transfer, between = (json.loads(s.serve_args.value("--kv-transfer-config") or "") for s in (server, without))
        # vLLM's scheduler waits for steps in flight before it gives away a consumer's blocks, and the tier fills some.
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("MultiConnector", "kv_both")
        first, second = transfer["kv_connector_extra_config"]["connectors"]
        assert first == between
        assert (second["kv_connector"], second["kv_role"]) == ("OffloadingConnector", "kv_both")
        assert second["kv_connector_extra_config"] == {"cpu_bytes_to_use": size * 2**30}
        assert "--kv-offloading-size" not in server.serve_args


def test_without_gpus_there_is_no_tier_beside_the_folder():
    plan = on_cpu(wishes=resolve_wishes(["disaggregation", "kv-tiering"], []))
    assert plan.group is not None
    assert not any("MultiConnector" in word for server in plan.group.servers for word in server.serve_args.words)
    assert any("kv tiering" in warning and "CPU build" in warning for warning in plan.warnings)


def test_without_gpus_the_cache_goes_through_a_folder_of_the_run():
    plan = on_cpu()
    assert plan.group is not None
    for server in plan.group.servers:
        transfer = json.loads(server.serve_args.value("--kv-transfer-config") or "")
        assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "RUN_DIR/kv"}
