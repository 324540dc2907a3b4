"""Exchanges replicas between a full and an empty rank, as long as the fuller of the two gets lighter."""

# B rows, S slots, R ranks, A active rows, N pairs of ranks in them, P places looked at.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.placement.rows import Floats, Ids, ascending

_ROUNDS = 4
"""Chosen: on Zipf and log-normal loads later rounds change the largest load by less than 0.1 %."""
_PAIRED_SHARE = 4
"""Chosen: one rank in so many, and as many of the emptiest, take part in a round; only the fullest rank counts."""
_FEWEST_PAIRS = 4
_MOST_SLOTS = 16
"""Chosen: slots of a rank that are looked at. All pairs of slots would cost the square of the slots in time, and with
many slots the greedy packing leaves little to gain. The pairs are counted in 8 bits."""


class Exchanged(NamedTuple):
    """A placement after exchanges."""

    placement: Ids
    """[B, S]."""
    largest_before: Floats
    """[B]: load of the fullest rank before the exchanges."""
    largest: Floats
    """[B]: the same after them, never more."""


def exchange(placement_BS: Ids, share_BS: Floats, num_ranks: int, enough_B: Floats) -> Exchanged:
    """Exchange replicas between ranks; no rank of a row ends fuller than its fullest one was.

    In each round the fullest rank is paired with the emptiest, the next with the next, and each pair makes the one
    exchange that helps it most.

    Args:
        placement_BS: the expert of each slot.
        share_BS: its tokens.
        num_ranks: R; divides the slots.
        enough_B: a row is done when its largest load is at most this.
    """
    rows, num_slots = placement_BS.shape
    places = num_slots // num_ranks
    state = _State(placement_BS.flatten(), share_BS.flatten(), num_ranks, places)
    loads_BR = state.load.reshape(rows, num_ranks)
    largest_before = loads_BR.max(axis=1)
    if num_ranks == 1 or places == 1:
        return Exchanged(placement_BS, largest_before, largest_before)
    active = np.flatnonzero(largest_before > enough_B)
    for _ in range(_ROUNDS):
        if not active.size:
            break
        active = active[_exchange_once(state, active)]
        active = active[loads_BR[active].max(axis=1) > enough_B[active]]
    return Exchanged(state.expert.reshape(rows, num_slots), largest_before, loads_BR.max(axis=1))


class _State:
    """All slots and ranks of all rows as flat arrays, changed in place. Slot s is of rank s // places."""

    def __init__(self, expert: Ids, share: Floats, num_ranks: int, places: int) -> None:
        self.expert, self.share = expert, share
        self.load = share.reshape(-1, places).sum(axis=1)
        self.num_ranks, self.places = num_ranks, places
        self.step = -(-places // _MOST_SLOTS)
        """Every place of a rank is looked at, or every second, ...: the greedy packing left them heaviest first."""
        self.num_pairs = min(num_ranks // 2, max(_FEWEST_PAIRS, num_ranks // _PAIRED_SHARE))

    def shares_of(self, rank_N: Ids) -> NDArray[np.float32]:
        """Return the loads of the slots that are looked at of some ranks: [P, N]."""
        share_NP = self.share.reshape(-1, self.places).take(rank_N, axis=0)[:, :: self.step]
        return np.ascontiguousarray(share_NP.T, dtype=np.float32)


def _exchange_once(state: _State, active: Ids) -> NDArray[np.bool_]:
    """Make at most one exchange per pair of ranks in the rows `active`; returns which of these rows changed."""
    load_AR = state.load.reshape(-1, state.num_ranks).take(active, axis=0)
    order = ascending(load_AR) + active[:, None] * state.num_ranks
    full_N = order[:, : -state.num_pairs - 1 : -1].ravel()
    empty_N = order[:, : state.num_pairs].ravel()
    load_full, load_empty = state.load.take(full_N), state.load.take(empty_N)
    source, target = _best_slots(state, full_N, empty_N, (load_full - load_empty) / 2)
    given = state.share.take(source) - state.share.take(target)
    helps = np.maximum(load_full - given, load_empty + given) < load_full
    source, target, given = source[helps], target[helps], given[helps]
    for values in (state.expert, state.share):
        values[source], values[target] = values[target], values[source]
    state.load[full_N[helps]] -= given
    state.load[empty_N[helps]] += given
    return helps.reshape(len(active), -1).any(axis=1)


def _best_slots(state: _State, full_N: Ids, empty_N: Ids, half_N: Floats) -> tuple[Ids, Ids]:
    """Return for each pair of ranks the slots to exchange.

    The fuller rank is lightest afterwards where what it gives is nearest to half their difference, `half_N`. In
    float32, because which exchange is best may be off by a rounding. The pairs are the last axis: steps over short rows
    would take most of the time.
    """
    share_full = state.shares_of(full_N)
    share_full -= half_N.astype(np.float32)
    share_empty = state.shares_of(empty_N)
    looked_at = len(share_full)
    off = (share_full[:, None] - share_empty).reshape(looked_at**2, -1)
    np.abs(off, out=off)
    # argmin over the first axis takes ten times as long as this.
    number = np.arange(looked_at**2, dtype=np.uint8)[:, None]
    best = np.where(off == off.min(axis=0), number, 0).max(axis=0).astype(np.int64)
    slot_full, slot_empty = np.divmod(best, looked_at)
    return full_N * state.places + slot_full * state.step, empty_N * state.places + slot_empty * state.step
