"""Passes that a later version applies: what they say where they could be used, and where they could not."""

from __future__ import annotations

import pytest

from moe_optimizer.passes.base import NOT_AVAILABLE
from moe_optimizer.plan.decision import Status, Wish
from tests.builders import (
    context,
    decided_by,
    deepseek_v3,
    dense_model,
    gpus,
    profile_with,
    qwen3_30b_a3b,
)

H100, EIGHT = gpus("h100_sxm", 1), gpus("h100_sxm", 8)
EP = profile_with(passes={"parallelism": {"expert_parallel": "on"}})
DP_EP = profile_with(passes={"parallelism": {"expert_parallel": "on", "data_parallel_size": 2}})


@pytest.mark.parametrize(
    ("name", "model", "hardware", "profile", "status", "why"),
    [
        ("sparsity_24", qwen3_30b_a3b(), H100, None, Status.UNAVAILABLE, NOT_AVAILABLE),
        ("sparsity_24", deepseek_v3(), EIGHT, None, Status.REFUSED, "unquantised expert weights to prune, found fp8"),
        ("sparsity_24", dense_model(), H100, None, Status.REFUSED, "no experts"),
    ],
)
def test_asked_for_by_name(name, model, hardware, profile, status, why):
    ctx = context(model, hardware, profile, wishes={name: (Wish.ON, "flag")})
    decision = decided_by(ctx, "parallelism", name).decided[name]
    assert decision.status is status
    assert why in decision.reason
