"""Chooses which number of tokens is measured next, and which kernels are worth it there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from moe_optimizer.specs.kernel_speeds import STOCK, TokenSpeeds

LARGEST_SIZE = 8192
"""Tokens of the largest step that is measured."""
_FIRST = {"cuda": (1, LARGEST_SIZE, 64, 512, 8), "cpu": (1, 256, 16, 4, 64)}
"""From both ends: a decode step of one request, a step full of prompts, then the batches between."""
_SIZES = tuple(2**power for power in range(14))
"""What a gap is filled with on GPUs."""
_CLEAR = 0.05
"""Chosen: a kernel that gains this much at both ends of a gap is taken to gain inside it."""
_WIDEST_OURS = 4
_WIDEST_STOCK = 8
"""Chosen: the widest gaps, upper over lower end, over which nothing is measured inside."""
_HOPELESS = 1.25
"""Chosen: a family of kernels that takes this much longer than the best at both neighbours is not tried between."""
_LOST = 1.1
"""Chosen: what computes all numbers of tokens and takes this much longer than the best anywhere is not used, whatever
else is measured: our CPU kernel, and another backend of vLLM."""

Rows = Mapping[int, TokenSpeeds]
"""What was measured, by number of tokens."""


def next_size(device: str, rows: Rows) -> int | None:
    """Return which number of tokens to measure next; None: more would change nothing.

    After the first ones, gaps are halved where the kernel to use changes, the widest first. On the CPU one kernel is
    used for all numbers of tokens: once ours has clearly lost, the rest does not matter.
    """
    if device == "cpu" and any(_best(row) > _LOST * row.stock_us for row in rows.values()):
        return None
    for tokens in _FIRST[device]:
        if tokens not in rows:
            return tokens
    if device == "cpu":
        return None
    gaps = [gap for gap in itertools.pairwise(sorted(rows)) if _inside(*gap) and not _settled(rows, *gap)]
    if not gaps:
        return None
    inside = _inside(*max(gaps, key=lambda gap: gap[1] / gap[0]))
    return inside[len(inside) // 2]


def share_done(device: str, rows: Rows) -> float:
    """Return about which share of the numbers of tokens is measured."""
    left = len(_SIZES) if device == "cuda" else len(_FIRST["cpu"])
    return min(1.0, len(rows) / left)


def worth_timing(names: Sequence[str], tokens: int, rows: Rows) -> tuple[str, ...]:
    """Return which of our kernels to time at so many tokens: not those whose family lost at both neighbours."""
    below = [size for size in rows if size < tokens]
    above = [size for size in rows if size > tokens]
    if not below or not above:
        return tuple(names)
    neighbours = (rows[max(below)], rows[min(above)])
    hopeful = set().union(*(_hopeful_families(row) for row in neighbours))
    return tuple(name for name in names if family(name) in hopeful) or tuple(names)


def without_losers(times: Mapping[str, float]) -> tuple[str, ...]:
    """Return which kernels to go on timing after a first sample of each: vLLM's, the best of ours, and those of ours
    that may still beat vLLM's.
    """
    ours = {name: time for name, time in times.items() if name != STOCK}
    if not ours:
        return tuple(times)
    best = min(ours, key=lambda name: ours[name])
    limit = min(_HOPELESS * ours[best], (1 + _CLEAR) * times[STOCK])
    return tuple(name for name in times if name in (STOCK, best) or times[name] <= limit)


def peers_in_the_race(names: Iterable[str], rows: Rows, taken: str) -> tuple[str, ...]:
    """Return which of vLLM's other backends may still be the best for a whole server: those that lost clearly nowhere,
    and the one that vLLM takes by itself.
    """
    lost = {
        name
        for row in rows.values()
        for name, time in row.peers_us.items()
        if time > _LOST * min(row.stock_us, _best(row))
    }
    return tuple(name for name in names if name == taken or name not in lost)


def family(name: str) -> str:
    """Return a kernel's name without its tile: kernels of one family are fast and slow together."""
    base, _, tile = name.partition("-n")
    return f"{base} paired" if tile.endswith("x2") else base


def _hopeful_families(row: TokenSpeeds) -> Iterable[str]:
    return {family(name) for name, time in row.ours_us.items() if time <= _HOPELESS * _best(row)}


def _settled(rows: Rows, lower: int, upper: int) -> bool:
    """Return whether one kernel clearly is the one to use between two measured numbers of tokens."""
    ends, ratio = (rows[lower], rows[upper]), upper / lower
    if all(_best(row) >= (1 + _CLEAR) * row.stock_us for row in ends):
        return ratio <= _WIDEST_STOCK
    return ratio <= _WIDEST_OURS and any(
        all(_clearly_best(row, name) for row in ends) for name in ends[0].ours_us.keys() & ends[1].ours_us.keys()
    )


def _clearly_best(row: TokenSpeeds, name: str) -> bool:
    time = row.ours_us[name]
    return time <= (1 - _CLEAR) * row.stock_us and time <= (1 + _CLEAR) * _best(row)


def _best(row: TokenSpeeds) -> float:
    return min(row.ours_us.values(), default=float("inf"))


def _inside(lower: int, upper: int) -> list[int]:
    return [size for size in _SIZES if lower < size < upper]
