"""Replicates the busiest experts and packs replicas on ranks, all rows at once: DeepSeek's two greedy steps.

The results carry the same loads as vLLM's default policy: what follows only improves on them, which is how a placement
is never worse than that policy's. Equal loads are taken in the order of their experts; that policy takes them in an
order that depends on the CPU. Rows are independent problems (a layer, or a layer on one node).
"""

# B rows, E experts, S slots (replicas), P packs (ranks or nodes).

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.placement.rows import Floats, Ids, ascending, flat_positions, pick

_WORTH_SORTING = 16
"""Chosen: with fewer packs than these, sorting them takes longer than putting the items one by one."""
_RUN_SHARE = 8
"""Chosen: packs are sorted again for the next items when the last sorting served one item for so many packs."""


def replicate(load_BE: Floats, num_slots: int) -> tuple[Ids, Ids]:
    """Give each further slot to the expert whose replicas are busiest.

    This makes the busiest replica as light as it can be.

    Returns:
        The expert of each slot, [B, S], first every expert once, and the replicas of each expert, [B, E].
    """
    rows, num_experts = load_BE.shape
    expert_BS = np.empty((rows, num_slots), dtype=np.int64)
    expert_BS[:, :num_experts] = np.arange(num_experts)
    counts = np.ones((rows, num_experts), dtype=np.int64)
    share = load_BE.copy()
    load, count, flat_share = load_BE.ravel(), counts.ravel(), share.ravel()
    first = np.arange(rows) * num_experts
    for slot in range(num_experts, num_slots):
        busiest = share.argmax(axis=1)
        expert_BS[:, slot] = busiest
        busiest += first
        count[busiest] += 1
        flat_share[busiest] = load[busiest] / count[busiest]
    return expert_BS, counts


def pack(weight_BS: NDArray[np.floating], num_packs: int) -> Ids:
    """Put each item, heaviest first, on the lightest pack with a free place; all packs get S / P items.

    Returns:
        The items in pack order, [B, S]: the first S / P are those of pack 0, in the order they were put there.
    """
    rows, num_items = weight_BS.shape
    places = num_items // num_packs
    if places == 1:
        return np.broadcast_to(np.arange(num_items), weight_BS.shape).copy()
    order = ascending(-weight_BS)
    weight = pick(weight_BS, order).astype(np.float64, copy=False)
    state = _Packs(weight[:, :num_packs], places)
    pack_SB = np.empty((num_items, rows), dtype=np.int64)
    # The first items find every pack empty.
    pack_SB[:num_packs] = np.arange(num_packs)[:, None]
    weight_SB = np.ascontiguousarray(weight.T)
    for start in range(num_packs, num_items, num_packs):
        done, end = start, start + num_packs
        worth_sorting = num_packs >= _WORTH_SORTING
        while worth_sorting and done < end:
            certain = state.put_certain(weight[:, done:end])
            pack_SB[done : done + certain.shape[1]] = certain.T
            done += certain.shape[1]
            worth_sorting = certain.shape[1] * _RUN_SHARE >= num_packs
        for item in range(done, end):
            state.put_one(weight_SB[item], out=pack_SB[item])
    by_pack = np.argsort(pack_SB.T.astype(np.uint16), axis=1, kind="stable")
    return pick(order, by_pack)


class _Packs:
    """How heavy each pack is and how many places it has left; all have one item at first."""

    def __init__(self, weight_BP: Floats, places: int) -> None:
        rows, packs = weight_BP.shape
        self.total = weight_BP.copy()
        """Infinite for a full pack: it is never the lightest."""
        self.flat_total = self.total.ravel()
        self.free = np.full(rows * packs, places - 1)
        self.first = np.arange(0, rows * packs, packs)
        self.closed = np.zeros(places)
        """By places left: what to add to the total."""
        self.closed[0] = np.inf

    def put_one(self, weight_B: Floats, *, out: Ids) -> None:
        """Put an item on the lightest pack of each row, whose number is written to `out`."""
        self.total.argmin(axis=1, out=out)
        flat = out + self.first
        total = self.flat_total.take(flat)
        total += weight_B
        free = self.free.take(flat)
        free -= 1
        self.free[flat] = free
        total += self.closed.take(free)
        self.flat_total[flat] = total

    def put_certain(self, weight_BI: Floats) -> Ids:
        """Put the first of at most P items, as many as surely go to different packs in every row: the lightest, ...

        They do as long as the next pack is lighter than every one that has just got its item.

        Returns:
            The packs in the order of the items, [B, n]; at least one.
        """
        num_items = weight_BI.shape[1]
        flat, before = self._lightest(num_items)
        after = before + weight_BI
        # Transposed: rows of the result are then made from whole rows.
        fullest_so_far = np.minimum.accumulate(after.T, axis=0).T
        certain = np.all(before[:, 1:] < fullest_so_far[:, :-1], axis=0)
        count = num_items if certain.all() else int(certain.argmin()) + 1
        flat = flat[:, :count]
        free = self.free.take(flat)
        free -= 1
        self.free[flat] = free
        self.flat_total[flat] = after[:, :count] + self.closed.take(free)
        return flat - self.first[:, None]

    def _lightest(self, count: int) -> tuple[Ids, Floats]:
        """Return the flat positions of the lightest packs of each row, ascending, and their weights.

        Of equals the first comes first, as in `put_one`.
        """
        flat = flat_positions(ascending(self.total)[:, :count], self.total.shape[1])
        return flat, self.flat_total.take(flat)
