"""What the answers of two servers, and the proofs beside them, must have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import Answer


def assert_ours_ran(proofs: Sequence[Proof], *, workers: int, dtype: str, expert_map: bool = False) -> None:
    holders = model_holders(proofs)
    assert [proof.model_rank for proof in holders] == list(range(workers))
    for proof in holders:
        entry = proof.passes["flash_dmoe"]
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert [layer.name for layer in entry.layers] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
        assert all(layer.calls > 0 and layer.dtype == dtype for layer in entry.layers)
        assert all(layer.expert_map == expert_map for layer in entry.layers)
        assert all(layer.num_local_experts == (16 // workers if expert_map else 16) for layer in entry.layers)


def assert_same_up_to_a_tie(stock: Answer, ours: Answer, *, spacings: float = 1.0) -> None:
    """Up to the first difference the context is the same, so there the choice must have been a toss-up.

    Args:
        spacings: by how many distances between BF16 numbers the best two logits may differ there.
    """
    pairs = enumerate(zip(stock.tokens, ours.tokens, strict=True))
    position = next((i for i, (one, other) in pairs if one != other), None)
    if position is None:
        return
    best_two = stock.best_two[position]
    assert set(best_two) >= {stock.tokens[position], ours.tokens[position]}, (position, best_two, ours.tokens[position])
    high, low = sorted(best_two.values(), reverse=True)[:2]
    assert high - low <= spacings * bf16_spacing(high), f"position {position}: logits {high} and {low}"


def bf16_spacing(value: float) -> float:
    """Distance from one BF16 number to the next at `value`: BF16 has 8 significant bits."""
    return 2.0 ** (math.frexp(abs(value))[1] - 8) if value else 0.0
