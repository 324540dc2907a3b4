"""The same tokens as stock vLLM, with our kernel really doing the work in every worker."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from moe_optimizer.vllm_plugin.proof_table import model_holders
from tests.vllm.conftest import MAX_TOKENS, PROMPTS, Answer, Served, tiny_plan

pytestmark = pytest.mark.vllm


def tokens(served: Served) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in served.answers]


def assert_ours_ran(served: Served, *, workers: int, dtype: str, expert_map: bool = False) -> None:
    assert served.info is not None
    holders = model_holders(served.info.proofs)
    assert [proof.model_rank for proof in holders] == list(range(workers))
    for proof in holders:
        entry = proof.passes["flash_dmoe"]
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert [layer.name for layer in entry.layers] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
        assert all(layer.calls > 0 and layer.dtype == dtype for layer in entry.layers)
        assert all(layer.expert_map == expert_map for layer in entry.layers)
        assert all(layer.num_local_experts == (16 // workers if expert_map else 16) for layer in entry.layers)


def test_compiled_fp32_equals_stock_although_the_compile_cache_holds_its_graph(
    stock_fp32: Served, ours_fp32: Served
) -> None:
    assert_ours_ran(ours_fp32, workers=1, dtype="float32")
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


def test_fp32_with_tensor_parallelism_equals_stock(stock_fp32: Served, serve_once: Callable[..., Served]) -> None:
    served = serve_once(tiny_plan("--enforce-eager", "--tensor-parallel-size", "2"))
    assert_ours_ran(served, workers=2, dtype="float32")
    assert tokens(served) == tokens(stock_fp32)


def test_fp32_with_expert_parallelism_equals_stock(stock_fp32: Served, ours_expert_parallel: Served) -> None:
    # Stock itself cannot be compared with here: its CPU kernel ignores the expert map and crashes.
    assert_ours_ran(ours_expert_parallel, workers=2, dtype="float32", expert_map=True)
    assert tokens(ours_expert_parallel) == tokens(stock_fp32)


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


def assert_same_up_to_a_tie(stock: Answer, ours: Answer) -> None:
    """Up to the first difference the context is the same, so there the choice must have been a toss-up."""
    pairs = enumerate(zip(stock.tokens, ours.tokens, strict=True))
    position = next((i for i, (one, other) in pairs if one != other), None)
    if position is None:
        return
    best_two = stock.best_two[position]
    assert set(best_two) >= {stock.tokens[position], ours.tokens[position]}, (position, best_two, ours.tokens[position])
    high, low = sorted(best_two.values(), reverse=True)[:2]
    assert high - low <= bf16_spacing(high), f"position {position}: logits {high} and {low}"


def bf16_spacing(value: float) -> float:
    """Distance from one BF16 number to the next at `value`: BF16 has 8 significant bits."""
    return 2.0 ** (math.frexp(abs(value))[1] - 8) if value else 0.0


@pytest.mark.parametrize(("value", "spacing"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 2**-3)])
def test_bf16_spacing(value: float, spacing: float) -> None:
    assert bf16_spacing(value) == spacing
