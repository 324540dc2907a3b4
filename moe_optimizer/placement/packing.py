"""Replicas for the busiest experts, and replicas to ranks: the two greedy steps of DeepSeek's EPLB, all rows at once.

The results carry the same loads as vLLM's default policy, ties included: what follows only improves on them, which is
how a placement is never worse than that policy's. Rows are independent problems (a layer, or a layer on one node).
"""

# B rows, E experts, S slots (replicas), P packs (ranks or nodes).
# ruff: noqa: N803, N806

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


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
    order = np.argsort(-weight_BS, axis=-1)
    weight_SB = np.ascontiguousarray(np.take_along_axis(weight_BS, order, axis=1).T, dtype=np.float64)
    # The first items find every pack empty.
    total = weight_SB[:num_packs].T.copy()
    free = np.full(rows * num_packs, places - 1)
    flat_total = total.ravel()
    first = np.arange(rows) * num_packs
    closed = np.zeros(places)
    closed[0] = np.inf
    pack_SB = np.empty((num_items, rows), dtype=np.int64)
    pack_SB[:num_packs] = first + np.arange(num_packs)[:, None]
    for weight, lightest in zip(weight_SB[num_packs:], pack_SB[num_packs:], strict=True):
        total.argmin(axis=1, out=lightest)
        np.add(lightest, first, out=lightest)
        new_total = flat_total.take(lightest)
        new_total += weight
        left = free.take(lightest)
        left -= 1
        free[lightest] = left
        # Of an infinite total, a full pack is never the lightest.
        new_total += closed.take(left)
        flat_total[lightest] = new_total
    pack_BS = (pack_SB - first).T.astype(np.uint16)
    by_pack = np.argsort(pack_BS, axis=1, kind="stable")
    return np.take_along_axis(order, by_pack, axis=1)
