"""The attention of decoding tokens in one call against its steps, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops import decode_attention, few_rows, paged_attention, token_rows
from moe_optimizer.ops.few_rows import MOST_ROWS
from tests.compiled_kernels import needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10"),
]

EPS = 1e-6
HEADS, KV_HEADS, SIZE, HIDDEN, BLOCK = 6, 2, 10, 37, 4
Arguments = dict[str, Any]


def arguments(tokens: int, *, normed: bool = True, biased: bool = False) -> Arguments:
    """Sequences of 1, 4, 7 .. tokens, whose last one is computed; blocks are taken from the end of the cache."""
    torch.manual_seed(tokens)
    lengths = torch.arange(tokens) * 3 + 1
    width, wide = -(-int(lengths.max()) // BLOCK), (HEADS + 2 * KV_HEADS) * SIZE
    tables = (tokens * width - 1 - torch.arange(tokens * width)).reshape(tokens, width).int()
    last = lengths - 1
    slots = tables[torch.arange(tokens), last // BLOCK].long() * BLOCK + last % BLOCK
    cache = torch.randn(2, tokens * width, BLOCK, KV_HEADS, SIZE)
    return {
        "x_TC": torch.randn(tokens, HIDDEN),
        "qkv": (torch.randn(wide, HIDDEN), torch.randn(wide) if biased else None),
        "o": (torch.randn(HIDDEN, HEADS * SIZE), torch.randn(HIDDEN) if biased else None),
        "rope": (torch.randn(tokens, 1, SIZE), torch.randn(tokens, 1, SIZE)),
        "places": (cache, slots, tables, lengths),
        "norms": (torch.randn(SIZE), torch.randn(SIZE)) if normed else None,
        "eps": EPS,
    }


def one_by_one(given: Arguments) -> Tensor:
    """The steps; the cache of the arguments is written."""
    (keys, values), slots, tables, lengths = given["places"]
    qkv = few_rows.product(given["x_TC"], *given["qkv"])
    assert qkv is not None
    qkv_TNd = qkv.unflatten(-1, (-1, SIZE))
    assert token_rows.turn_heads(qkv_TNd[:, : HEADS + KV_HEADS], HEADS, given["rope"], given["norms"], EPS)
    q, k, v = qkv_TNd.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    for new, stored in ((k, keys), (v, values)):
        assert token_rows.store_rows(new, slots, stored)
    attended = paged_attention(q, keys, values, tables, lengths)
    out = few_rows.product(attended.flatten(1), *given["o"])
    assert out is not None
    return out


@pytest.mark.parametrize("tokens", [1, 2, MOST_ROWS])
@pytest.mark.parametrize(("normed", "biased"), [(False, True), (True, False)])
def test_the_result_and_the_cache_are_those_of_the_steps(tokens: int, normed: bool, biased: bool) -> None:
    given = arguments(tokens, normed=normed, biased=biased)
    other = given | {"places": (given["places"][0].clone(), *given["places"][1:])}
    got = decode_attention.computed(**given)
    assert got is not None
    assert torch.equal(got, one_by_one(other))
    assert torch.equal(given["places"][0], other["places"][0])


def changed(given: Arguments, name: str, at: int | None, change: Any) -> Arguments:
    if at is None:
        return given | {name: change(given[name])}
    parts = list(given[name])
    parts[at] = change(parts[at])
    return given | {name: tuple(parts)}


@pytest.mark.parametrize(
    ("name", "at", "change"),
    [
        ("x_TC", None, lambda each: each.double()),
        ("x_TC", None, lambda each: each[:, 1:]),
        ("x_TC", None, lambda each: each[:2]),
        ("x_TC", None, lambda each: each.T.contiguous().T),
        ("x_TC", None, lambda each: each.repeat(MOST_ROWS, 1)),
        ("qkv", 0, lambda each: each[:-1]),
        ("qkv", 0, lambda each: each.half()),
        ("qkv", 1, lambda _: torch.zeros(3)),
        ("o", 0, lambda each: each[:, :-1]),
        ("o", 0, lambda each: each[:, :-SIZE]),
        ("o", 1, lambda _: torch.zeros(3)),
        ("rope", 0, lambda each: each[:2]),
        ("rope", 1, lambda each: each[..., :-1]),
        ("places", 0, lambda each: each.half()),
        ("places", 0, lambda each: each[:1]),
        ("places", 0, lambda each: each.transpose(1, 2)),
        ("places", 1, lambda each: each.int()),
        ("places", 1, lambda each: each[:2]),
        ("places", 1, lambda each: each + 1000),
        ("places", 2, lambda each: each.long()),
        ("places", 2, lambda each: each[:2]),
        ("places", 2, lambda each: each + 1000),
        ("places", 2, lambda each: each - 1000),
        ("places", 3, lambda each: each[:2]),
        ("places", 3, lambda each: each + 1000),
        ("norms", 0, lambda each: each[:-1]),
        ("norms", 1, lambda each: each.half()),
    ],
)
def test_what_does_not_fit_is_left_to_the_steps(name: str, at: int | None, change: Any) -> None:
    given = arguments(3)
    assert decode_attention.computed(**given) is not None
    assert decode_attention.computed(**changed(given, name, at, change)) is None
