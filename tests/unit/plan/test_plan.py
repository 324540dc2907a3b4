from __future__ import annotations

import json

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.plan.plan import Plan
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.golden.stored import PLANS, read_plan


def test_a_plan_survives_json(plan):
    again = Plan.from_json(plan.to_json(), origin="f")
    assert again == plan
    assert again.digest == plan.digest


def test_equal_requests_give_equal_plans():
    first, second = (made_plan(tiny_moe(), cpu_machine()) for _ in range(2))
    assert first == second
    assert first.digest == second.digest


def test_the_digest_tells_plans_apart(plan):
    assert plan.digest != plan.replace(num_gpus=1).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version: got 99"),
        ({"num_gpus": "2"}, "f: num_gpus: got"),
        ({"num_gpu": 2}, "unknown field 'num_gpu'"),
    ],
)
def test_a_damaged_plan_names_the_field(plan, change, message):
    with pytest.raises(InputError, match="f") as caught:
        Plan.from_json(json.dumps(json.loads(plan.to_json()) | change), origin="f")
    assert message in str(caught.value)


@pytest.mark.parametrize("change", [lambda data: data.pop("num_gpus"), lambda data: data.update(zzz=1)])
def test_a_plan_of_another_version_is_to_be_made_again(plan, change):
    data = json.loads(plan.to_json())
    change(data)
    with pytest.raises(InputError) as caught:
        Plan.from_json(json.dumps(data), origin="f")
    assert "make the plan again" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InputError, match="JSON"):
        Plan.from_json(text, origin="f")


GOLDEN = {path.stem: path for path in PLANS}


@pytest.mark.parametrize("case", ["qwen3-30b-a3b_h200-x1_tuned", "deepseek-v3_h200-x8_balanced"])
def test_stock_vllm_does_without_the_variables_of_passes(case: str) -> None:
    planned = read_plan(GOLDEN[case])
    assert planned.serve_env
    assert planned.stock().serve_env == {}


def test_stock_vllm_keeps_its_layout_and_memory() -> None:
    planned = read_plan(GOLDEN["tiny-moe_cpu_placed"])
    assert {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"} == planned.stock().serve_env.keys()
    assert planned.stock().serve_args == planned.plain_args


@pytest.mark.parametrize("case", ["qwen3-30b-a3b_h100_sxm-x8_aggressive", "qwen3-30b-a3b_h200-x2_disaggregated"])
def test_each_server_of_a_group_is_stock_vllm_at_its_place(case: str) -> None:
    planned = read_plan(GOLDEN[case])
    stock = planned.stock()
    assert planned.group is not None
    assert stock.group is not None
    for before, server in zip(planned.group.servers, stock.group.servers, strict=True):
        assert server.serve_args.without("--host", "--port", "--kv-transfer-config") == planned.plain_args.without(
            "--host", "--port"
        )
        for flag in ("--host", "--port", "--kv-transfer-config"):
            assert server.serve_args.value(flag) == before.serve_args.value(flag)
        assert (server.gpus, server.serve_env) == (before.gpus, before.serve_env)
