"""A plan with most passes on, which these tests show, store and spoil copies of."""

from __future__ import annotations

import pytest

from moe_optimizer.plan.plan import Plan
from moe_optimizer.planner import make_plan
from tests.builders import gpus, qwen3_30b_a3b, request


@pytest.fixture(scope="session")
def plan() -> Plan:
    return make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 2), "aggressive"))
