"""A request that the planner refuses."""

from __future__ import annotations

import pytest

from moe_optimizer.errors import InputError, MoeOptimizerError
from moe_optimizer.planner import PlanRequest, make_plan


def refused(plan_request: PlanRequest, error: type[MoeOptimizerError] = InputError) -> MoeOptimizerError:
    with pytest.raises(error) as caught:
        make_plan(plan_request)
    return caught.value
