"""In BF16 the tokens of vLLM's own kernel up to toss-ups; that kernel computes where ours is broken."""

from __future__ import annotations

import pytest

from moe_optimizer.proof.verdict import model_holders, not_running
from tests.vllm.answers import assert_ours_ran, assert_same_up_to_a_tie, bf16_spacing
from tests.vllm.conftest import Offline, Served


def test_a_broken_kernel_leaves_the_layers_to_vllm_and_the_table_says_why(offline: dict[str, Offline]) -> None:
    broken = offline["broken kernel"]
    row = broken.row("flash_dmoe")
    assert (row.applied, row.ran) == ("no", "no")
    assert row.why_not.startswith("fallback: ")
    assert "injected" in row.why_not
    assert "injected" in not_running(broken.plan, broken.proofs, ["flash_dmoe"])["flash_dmoe"]
    (holder,) = model_holders(broken.proofs)
    assert holder.passes["flash_dmoe"].layers == ()


def test_bf16_differs_from_stock_only_where_the_best_two_logits_are_as_good_as_equal(
    offline: dict[str, Offline], ours_bf16: Served
) -> None:
    assert_ours_ran(ours_bf16.proofs, workers=1, dtype="bfloat16")
    for stock, ours in zip(offline["broken kernel"].answers, ours_bf16.answers, strict=True):
        assert_same_up_to_a_tie(stock, ours)


@pytest.mark.parametrize(("value", "spacing"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 2**-3)])
def test_bf16_spacing(value: float, spacing: float) -> None:
    assert bf16_spacing(value) == spacing
