"""Finds names and slots with which as many experts as possible stay where they are."""

# B rows, U units (ranks of a node, or nodes), P slots of a unit.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.placement.rows import Ids, flat_positions

_ROUNDS = 4
"""Chosen: later rounds find names for less than a hundredth of the units."""


def names_near(new_BUP: Ids, old_BUP: Ids, num_items: int) -> Ids:
    """Return a name for each new unit, [B, U], so that most of its items are on the old unit of that name already.

    Units are exchangeable: any order has the same loads. In each round every new unit without a name asks for the free
    old one with which it has most items in common, and of those that ask for the same one the one with most gets it.

    Args:
        new_BUP: items (experts, or groups of them) of each unit, below `num_items`.
        old_BUP: the same before.
        num_items: kinds of items.
    """
    rows, units, _ = new_BUP.shape
    unit_of_item = np.full(rows * num_items, -1, dtype=np.int64)
    # Two axes, not three: steps over short rows take most of the time.
    old_unit_BS = np.arange(rows * units).repeat(old_BUP.shape[2]).reshape(rows, -1)
    unit_of_item[flat_positions(old_BUP.reshape(rows, -1), num_items)] = old_unit_BS
    wanted_XP = unit_of_item.take(flat_positions(new_BUP.reshape(rows, -1), num_items)).reshape(rows * units, -1)
    return _names(_match(np.ascontiguousarray(wanted_XP.T)).reshape(rows, units))


def renamed(new_BUP: Ids, names_BU: Ids) -> Ids:
    """Return `new_BUP` with its units in the order of their names."""
    result = np.empty_like(new_BUP)
    result[np.arange(len(new_BUP))[:, None], names_BU] = new_BUP
    return result


def _match(wanted_PX: Ids) -> Ids:
    """Return which old unit each new one takes, -1 for none; `wanted_PX` is the old unit of each of its items."""
    slots, units = wanted_PX.shape
    matched, taken = np.full(units, -1, dtype=np.int64), np.zeros(units + 1, dtype=bool)
    # What no old unit holds is wanted of a unit that nobody can have: index -1.
    taken[-1] = True
    owner = np.empty(units + 1, dtype=np.int64)
    asking = np.arange(units)
    # One number to compare: most in common, then the earliest slot.
    score_PX = _common(wanted_PX) * slots + np.arange(slots - 1, -1, -1, dtype=np.int32)[:, None]
    for _ in range(_ROUNDS):
        np.putmask(score_PX, taken.take(wanted_PX), -1)
        best = score_PX.max(axis=0).take(asking)
        asking, best = asking[best >= 0], best[best >= 0]
        unit = wanted_PX[slots - 1 - best % slots, asking]
        # The last to sign is the owner: of those with most in common the first. 16 bits sort in linear time.
        signing = len(asking) - 1 - np.argsort((best // slots)[::-1].astype(np.uint16), kind="stable")
        owner[unit[signing]] = asking[signing]
        won = owner.take(unit) == asking
        matched[asking[won]] = unit[won]
        taken[unit[won]] = True
        asking = asking[~won]
        if not asking.size:
            break
    return matched


def _common(wanted_PX: Ids) -> NDArray[np.int32]:
    """Return how many items of the same new unit want the same old unit as each of them does: [P, X]."""
    common_PX = np.zeros(wanted_PX.shape, dtype=np.int32)
    for other in wanted_PX:
        common_PX += wanted_PX == other
    return common_PX


def _names(old_of_new_BU: Ids) -> Ids:
    """Turn row * units + unit into unit, and give the unmatched units the names that are left, in order."""
    rows, units = old_of_new_BU.shape
    free = np.ones(rows * units, dtype=bool)
    free[old_of_new_BU[old_of_new_BU >= 0]] = False
    # Row by row there are as many unmatched units as free names.
    old_of_new_BU[old_of_new_BU < 0] = np.flatnonzero(free)
    return old_of_new_BU - np.arange(0, rows * units, units)[:, None]


def align_slots(new_BP: Ids, old_BP: Ids) -> Ids:
    """Return `new_BP` with each row reordered so that what it shares with the row of `old_BP` keeps its slot."""
    # Rows last: every step is then over long contiguous arrays.
    same_PPB = np.ascontiguousarray(old_BP.T)[:, None] == np.ascontiguousarray(new_BP.T)
    times_old, times_new = (np.add.reduce(same_PPB, axis=axis, dtype=np.uint16) for axis in (1, 0))
    # Row by row there are as many slots that lose their expert as experts without a slot.
    aligned = old_BP.copy()
    repeated = np.flatnonzero(np.maximum(times_old.max(axis=0), times_new.max(axis=0)) > 1)
    lost_BP, unplaced_BP = times_old.T == 0, times_new.T == 0
    if repeated.size:
        lost_BP[repeated] = unplaced_BP[repeated] = False
        aligned[repeated] = _align_repeated(new_BP[repeated], old_BP[repeated])
    aligned[lost_BP] = new_BP[unplaced_BP]
    return aligned


def _align_repeated(new_BP: Ids, old_BP: Ids) -> Ids:
    """As `align_slots`, for rows that have an expert twice: each copy keeps at most one slot."""
    unused = np.ones(new_BP.shape, dtype=bool)
    aligned = np.full_like(new_BP, -1)
    every_row = np.arange(len(new_BP))
    for slot in range(new_BP.shape[1]):
        match = (new_BP == old_BP[:, slot, None]) & unused
        at = match.argmax(axis=1)
        found = match[every_row, at]
        aligned[found, slot] = old_BP[found, slot]
        unused[every_row[found], at[found]] = False
    aligned[aligned < 0] = new_BP[unused]
    return aligned
