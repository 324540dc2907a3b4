"""A plan with most passes on, which these tests show, store and spoil copies of."""

from __future__ import annotations

import pytest

from moe_optimizer.plan.plan import Plan
from tests.builders import gpus, made_plan, qwen3_30b_a3b


@pytest.fixture(scope="session")
def plan() -> Plan:
    return made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 2), "aggressive")
