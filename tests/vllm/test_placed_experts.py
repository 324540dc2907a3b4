"""Experts placed by load on two real workers: weights and maps that moved together.

That the tokens are those of stock vLLM is asserted where the other servers' are (test_serving_equals_stock.py).
"""

from __future__ import annotations

from moe_optimizer.plan.pass_params import ExpertPlacementParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import Served


def test_every_worker_holds_the_experts_that_the_plan_gave_it(ours_expert_parallel: Served) -> None:
    params = (
        Plan.load(ours_expert_parallel.run_dir / "plan.json")
        .decision("expert_placement")
        .params_as(ExpertPlacementParams)
    )
    for row in params.experts.values():
        assert set(row.split()[:8]) != {str(expert) for expert in range(8)}, "a layer's experts did not move"
    holders = model_holders(ours_expert_parallel.proofs)
    assert [proof.model_rank for proof in holders] == [0, 1]
    for proof in holders:
        entry = proof.passes["expert_placement"]
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert entry.digest == params.digest
        assert [layer.name for layer in entry.layers] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
        assert all(layer.calls and layer.expert_map for layer in entry.layers)
