"""What disaggregation and replicas have in common: servers that share a machine behind a router."""

from __future__ import annotations

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.plan import Plan
from tests.builders import cpu_machine, made_plan, tiny_moe

PASSES = ("disaggregation", "replicas")


def on_cpu(name: str, **changes) -> Plan:
    return made_plan(tiny_moe(), cpu_machine(cores=4), wishes=resolve_wishes([name], []), **changes)


@pytest.mark.parametrize("name", PASSES)
def test_on_the_cpu_each_server_has_half_of_the_cores_and_of_the_memory(name):
    plan = on_cpu(name)
    assert plan.group is not None
    cores = [server.serve_env["VLLM_CPU_OMP_THREADS_BIND"] for server in plan.group.servers]
    assert cores == ["0-1", "2-3"]
    alone = made_plan(tiny_moe(), cpu_machine(cores=4))
    assert plan.memory.total_bytes == alone.memory.total_bytes // 2


@pytest.mark.parametrize("name", PASSES)
def test_the_users_own_port_is_the_routers(name):
    plan = on_cpu(name, vllm_args=("--port", "9100"))
    assert plan.group is not None
    assert plan.group.router_args.value("--port") == "9100"
    assert plan.group.servers[0].serve_args.value("--port") == "9101"


@pytest.mark.parametrize(("name", "port"), [("disaggregation", 65533), ("replicas", 65533)])
def test_a_port_without_room_for_the_others_is_refused(name, port):
    with pytest.raises(InputError, match=f"--port: got {port}, but "):
        on_cpu(name, port=port)


@pytest.mark.parametrize("name", PASSES)
def test_a_plan_of_several_servers_survives_its_file(name):
    plan = on_cpu(name)
    assert Plan.from_json(plan.to_json(), origin="test") == plan
