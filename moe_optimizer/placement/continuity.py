"""Names and slots that keep as many experts as possible where they already are."""

# B rows, U units (ranks of a node, or nodes), P slots of a unit.
# ruff: noqa: N803, N806

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def rename_units(new_BUP: Ids, old_BUP: Ids, num_experts: int) -> Ids:
    """Return `new_BUP` with its units in the order that leaves most experts on the unit that holds them in `old_BUP`.

    Units are exchangeable: any order has the same loads. Pairs of a new and an old unit are matched greedily, those
    with most experts in common first.
    """
    rows, units, _ = new_BUP.shape
    row = np.arange(rows)[:, None, None]
    unit_of_expert = np.full((rows, num_experts), -1, dtype=np.int64)
    unit_of_expert[row, old_BUP] = np.arange(units)[None, :, None]
    wanted = unit_of_expert[row, new_BUP]
    pair = (row * units + np.arange(units)[None, :, None]) * units + wanted
    pair = np.sort(pair[wanted >= 0])
    start = np.flatnonzero(np.diff(pair, prepend=-1))
    common = np.diff(start, append=pair.size)
    pairs = pair[start][np.argsort(-common, kind="stable")]
    old_of_new = _match(new=pairs // units, old=pairs // units**2 * units + pairs % units, size=rows * units)
    _match_rest(old_of_new.reshape(rows, units))
    renamed = np.empty_like(new_BUP)
    renamed[np.arange(rows)[:, None], old_of_new.reshape(rows, units)] = new_BUP
    return renamed


def _match(*, new: Ids, old: Ids, size: int) -> Ids:
    """Match each `new` with one `old`, earlier pairs first; both are row * units + unit. Unmatched are -1."""
    matched, taken = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=bool)
    while new.size:
        place = np.arange(new.size)
        first_new, first_old = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        first_new[new[::-1]] = place[::-1]
        first_old[old[::-1]] = place[::-1]
        both = (first_new[new] == place) & (first_old[old] == place)
        matched[new[both]] = old[both]
        taken[old[both]] = True
        left = (matched[new] < 0) & ~taken[old]
        new, old = new[left], old[left]
    return matched


def _match_rest(old_of_new_BU: Ids) -> None:
    """Turn row * units + unit into unit, and give the unmatched units the names that are left, in order."""
    rows, units = old_of_new_BU.shape
    unmatched = old_of_new_BU < 0
    old_of_new_BU -= np.arange(rows)[:, None] * units
    free = np.ones((rows, units), dtype=bool)
    row, unit = np.nonzero(~unmatched)
    free[row, old_of_new_BU[row, unit]] = False
    # Row by row there are as many unmatched units as free names.
    old_of_new_BU[unmatched] = np.nonzero(free)[1]


def align_slots(new_BP: Ids, old_BP: Ids) -> Ids:
    """Return `new_BP` with each row reordered so that what it shares with the row of `old_BP` keeps its slot."""
    rows, slots = new_BP.shape
    unused = np.ones(new_BP.shape, dtype=bool)
    aligned = np.full_like(new_BP, -1)
    every_row = np.arange(rows)
    for slot in range(slots):
        match = (new_BP == old_BP[:, slot, None]) & unused
        at = match.argmax(axis=1)
        found = match[every_row, at]
        aligned[found, slot] = old_BP[found, slot]
        unused[every_row[found], at[found]] = False
    # Row by row there are as many empty slots as unused experts.
    aligned[aligned < 0] = new_BP[unused]
    return aligned
