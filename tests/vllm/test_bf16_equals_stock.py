"""In BF16 the tokens of vLLM's own kernel up to toss-ups; that kernel computes where ours is broken."""

from __future__ import annotations

import pytest

from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.verdict import model_holders, not_running
from tests.vllm.answers import assert_ours_ran, assert_same_up_to_a_tie, bf16_spacing
from tests.vllm.conftest import Served


def test_a_broken_kernel_leaves_the_layers_to_vllm_and_the_table_says_why(fallback_bf16: Served) -> None:
    assert fallback_bf16.info is not None
    (row,) = [row for row in fallback_bf16.info.rows if row.pass_name == "flash_dmoe"]
    assert (row.applied, row.ran) == ("no", "no")
    assert row.why_not.startswith("fallback: ")
    assert "injected" in row.why_not
    plan = Plan.load(fallback_bf16.run_dir / "plan.json")
    assert "injected" in not_running(plan, fallback_bf16.proofs, ["flash_dmoe"])["flash_dmoe"]
    assert all(proof.passes["flash_dmoe"].layers == () for proof in model_holders(fallback_bf16.proofs))


def test_bf16_differs_from_stock_only_where_the_best_two_logits_are_as_good_as_equal(
    fallback_bf16: Served, ours_bf16: Served
) -> None:
    assert ours_bf16.info is not None
    for server in ours_bf16.info.servers:
        assert_ours_ran(server.proofs, workers=1, dtype="bfloat16")
    for stock, ours in zip(fallback_bf16.answers, ours_bf16.answers, strict=True):
        assert_same_up_to_a_tie(stock, ours)


@pytest.mark.parametrize(("value", "spacing"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 2**-3)])
def test_bf16_spacing(value: float, spacing: float) -> None:
    assert bf16_spacing(value) == spacing
