"""Makes a configuration file of tuned sizes that leaves every other size as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from moe_optimizer.inspection.tuned_configs import Row
from moe_optimizer.inspection.tuning_state import Verdict

LARGEST_TOKENS = 131_072
"""More than one step of a server takes."""

Stock = Callable[[int], Row]
"""The row that vLLM takes now for a number of tokens."""


def reach(sizes: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the sizes [low, high] that each of some tuned sizes stands for: up to halfway to its neighbours.

    The largest stands for nothing beyond itself.
    """
    ordered = sorted(set(sizes))
    halves = [1, *((left + right) // 2 + 1 for left, right in pairwise(ordered))]
    ends = [*(low - 1 for low in halves[1:]), ordered[-1]] if ordered else []
    return dict(zip(ordered, zip(halves, ends, strict=True), strict=True))


def file_rows(stock: Stock, wins: Sequence[Verdict], *, largest: int = LARGEST_TOKENS) -> dict[int, Row]:
    """Return rows with which vLLM takes the winner where a win reaches, and at every other size what it takes now.

    vLLM takes the row of the nearest key. A stretch of sizes with one row therefore has a key at both of its ends:
    with fewer keys, the row of one size would reach into sizes where it was never tried.

    Args:
        stock: what vLLM takes now.
        wins: rows that were faster; the sizes that they are used for do not overlap.
        largest: the last size for which stock is kept apart; beyond, its row there holds.
    """
    rows: dict[int, Row] = {}
    start, row = 1, _row_at(1, stock, wins)
    for tokens in range(2, largest + 2):
        following = _row_at(tokens, stock, wins) if tokens <= largest else None
        if following == row:
            continue
        rows |= {start: dict(row), tokens - 1: dict(row)}
        if following is not None:
            start, row = tokens, following
    return rows


def _row_at(tokens: int, stock: Stock, wins: Sequence[Verdict]) -> Row:
    return next((win.row for win in wins if win.low <= tokens <= win.high), None) or stock(tokens)
