"""In FP32 the same tokens as stock vLLM, with our kernel really doing the work in every worker."""

from __future__ import annotations

import pytest

from tests.vllm.answers import assert_ours_ran
from tests.vllm.conftest import MAX_TOKENS, PROMPTS, Served


def test_the_kill_switch_leaves_no_trace(stock_fp32: Served) -> None:
    assert stock_fp32.info is not None
    assert stock_fp32.proofs == ()
    (row,) = [row for row in stock_fp32.info.rows if row.pass_name == "flash_dmoe"]
    assert (row.applied, row.ran) == ("no", "no")
    assert "MOE_OPTIMIZER_DISABLE" in row.why_not
    # The launcher asks every server for its figures by name.
    said = [line for line in stock_fp32.info.log_path.read_text().splitlines() if "GET /metrics" not in line]
    assert not [line for line in said if "moe_optimizer" in line]


def tokens(served: Served) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in served.answers]


def test_compiled_fp32_equals_stock_although_the_compile_cache_holds_its_graph(
    stock_fp32: Served, ours_fp32: Served
) -> None:
    assert_ours_ran(ours_fp32.proofs, workers=1, dtype="float32")
    assert tokens(ours_fp32) == tokens(stock_fp32)


def test_fp32_logits_equal_stock_up_to_rounding(stock_fp32: Served, ours_fp32: Served) -> None:
    # Tokens alone say little where the model is sure of itself; the logits behind them say it at every position.
    compared = 0
    for stock, ours in zip(stock_fp32.answers, ours_fp32.answers, strict=True):
        for at_stock, at_ours in zip(stock.best_two, ours.best_two, strict=True):
            for token in at_stock.keys() & at_ours.keys():
                assert at_ours[token] == pytest.approx(at_stock[token], rel=1e-4, abs=1e-4)
                compared += 1
    assert compared > len(PROMPTS) * MAX_TOKENS


def test_fp32_with_tensor_parallelism_equals_stock(stock_fp32: Served, plain_tensor_parallel: Served) -> None:
    assert_ours_ran(plain_tensor_parallel.proofs, workers=2, dtype="float32")
    assert tokens(plain_tensor_parallel) == tokens(stock_fp32)


def test_fp32_with_expert_parallelism_equals_stock(stock_fp32: Served, ours_expert_parallel: Served) -> None:
    # Stock itself cannot be compared with here: its CPU kernel ignores the expert map and crashes.
    assert_ours_ran(ours_expert_parallel.proofs, workers=2, dtype="float32", expert_map=True)
    assert tokens(ours_expert_parallel) == tokens(stock_fp32)
