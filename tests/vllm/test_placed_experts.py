"""Experts placed by load on two real workers: the same tokens, from weights and maps that moved together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_optimizer.plan.pass_params import ExpertPlacementParams
from moe_optimizer.proof.verdict import model_holders
from tests.builders import placement_load, tiny_moe
from tests.vllm.conftest import Served, tiny_plan

pytestmark = pytest.mark.vllm


def test_fp32_with_placed_experts_equals_stock(stock_fp32: Served, serve_once: Callable[..., Served]) -> None:
    # Weights that moved without their map, or a map without its weights, send tokens to wrong experts.
    plan = tiny_plan(
        "--enforce-eager",
        "--tensor-parallel-size",
        "2",
        "--enable-expert-parallel",
        required=("expert_placement",),
        expert_load=placement_load(tiny_moe()),
    )
    params = plan.decision("expert_placement").params_as(ExpertPlacementParams)
    for row in params.experts.values():
        assert set(row.split()[:8]) != {str(expert) for expert in range(8)}, "a layer's experts did not move"
    served = serve_once(plan)
    assert served.info is not None
    holders = model_holders(served.info.proofs)
    assert [proof.model_rank for proof in holders] == [0, 1]
    for proof in holders:
        entry = proof.passes["expert_placement"]
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert entry.digest == params.digest
        assert [layer.name for layer in entry.layers] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
        assert all(layer.calls and layer.expert_map for layer in entry.layers)
    assert [answer.tokens for answer in served.answers] == [answer.tokens for answer in stock_fp32.answers]
