"""In BF16 the tokens of stock vLLM up to toss-ups, and nothing of ours where the kill switch is set."""

from __future__ import annotations

import pytest

from tests.vllm.answers import assert_ours_ran, assert_same_up_to_a_tie, bf16_spacing
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm


def test_the_kill_switch_leaves_no_trace(stock_bf16: Served) -> None:
    assert stock_bf16.info is not None
    assert stock_bf16.info.proofs == ()
    (row,) = [row for row in stock_bf16.info.rows if row.pass_name == "flash_dmoe"]
    assert (row.applied, row.ran) == ("no", "no")
    assert "MOE_OPTIMIZER_DISABLE" in row.why_not
    assert "moe_optimizer" not in stock_bf16.info.log_path.read_text()


def test_bf16_differs_from_stock_only_where_the_best_two_logits_are_as_good_as_equal(
    stock_bf16: Served, ours_bf16: Served
) -> None:
    assert_ours_ran(ours_bf16, workers=1, dtype="bfloat16")
    for stock, ours in zip(stock_bf16.answers, ours_bf16.answers, strict=True):
        assert_same_up_to_a_tie(stock, ours)


@pytest.mark.parametrize(("value", "spacing"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 2**-3)])
def test_bf16_spacing(value: float, spacing: float) -> None:
    assert bf16_spacing(value) == spacing
