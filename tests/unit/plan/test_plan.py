from __future__ import annotations

import json

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.plan.plan import Plan
from moe_optimizer.planner import make_plan
from tests.builders import cpu_machine, request, tiny_moe


def test_a_plan_survives_json(plan):
    again = Plan.from_json(plan.to_json(), origin="f")
    assert again == plan
    assert again.digest == plan.digest


def test_equal_requests_give_equal_plans():
    first, second = (make_plan(request(tiny_moe(), cpu_machine())) for _ in range(2))
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


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InputError, match="JSON"):
        Plan.from_json(text, origin="f")
