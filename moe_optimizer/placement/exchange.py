"""Exchanges of replicas between a full and an empty rank, as long as the fuller of the two gets lighter."""

# B rows, E experts, S slots, R ranks, H pairs of ranks.
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.placement.balance import replica_loads

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_ROUNDS = 6
"""Chosen: on Zipf and log-normal loads later rounds change the largest load by less than 0.1 %."""
_PAIRED_SHARE = 8
"""Chosen: one rank in so many, and as many of the emptiest, take part in a round; only the fullest rank counts."""
_FEWEST_PAIRS = 4
_MOST_SLOTS = 12
"""Chosen: slots of a rank that are looked at. All pairs of slots would cost the square of the slots in time, and with
many slots the greedy packing leaves little to gain."""
_EVEN_ENOUGH = 1e-4
"""Chosen: a row is left alone when its largest load is this close to the smallest possible one."""


class Exchanged(NamedTuple):
    """A placement after exchanges."""

    placement: Ids
    """[B, S]."""
    largest_before: Floats
    """[B]: load of the fullest rank before the exchanges."""
    largest: Floats
    """[B]: the same after them, never more."""


def exchange(load_BE: Floats, placement_BS: Ids, num_ranks: int) -> Exchanged:
    """Exchange replicas between ranks; no rank of a row ends fuller than its fullest one was.

    In each round the fullest rank is paired with the emptiest, the next with the next, and each pair makes the one
    exchange that helps it most.
    """
    rows, num_slots = placement_BS.shape
    places = num_slots // num_ranks
    state = _State(placement_BS.flatten(), replica_loads(load_BE, placement_BS).ravel(), num_ranks, places)
    loads_BR = state.load.reshape(rows, num_ranks)
    largest_before = loads_BR.max(axis=1)
    if num_ranks == 1 or places == 1:
        return Exchanged(placement_BS, largest_before, largest_before)
    busiest = state.share.reshape(rows, num_slots).max(axis=1)
    enough = np.maximum(loads_BR.mean(axis=1), busiest) * (1 + _EVEN_ENOUGH)
    active = np.arange(rows)
    for _ in range(_ROUNDS):
        active = active[loads_BR[active].max(axis=1) > enough[active]]
        if not active.size:
            break
        active = active[_exchange_once(state, active)]
    return Exchanged(state.expert.reshape(rows, num_slots), largest_before, loads_BR.max(axis=1))


class _State:
    """All slots and ranks of all rows as flat arrays, changed in place. Slot s is of rank s // places."""

    def __init__(self, expert: Ids, share: Floats, num_ranks: int, places: int) -> None:
        self.expert, self.share = expert, share
        self.load = share.reshape(-1, places).sum(axis=1)
        self.num_ranks, self.places = num_ranks, places
        # All places of a rank, or an even choice of them: the greedy packing left them heaviest first.
        self.looked_at = np.linspace(0, places - 1, min(places, _MOST_SLOTS)).astype(np.int64)
        self.num_pairs = min(num_ranks // 2, max(_FEWEST_PAIRS, num_ranks // _PAIRED_SHARE))


def _exchange_once(state: _State, active: Ids) -> NDArray[np.bool_]:
    """Make at most one exchange per pair of ranks in the rows `active`; returns which of these rows changed."""
    first_rank = active[:, None] * state.num_ranks
    order = np.argsort(state.load[first_rank + np.arange(state.num_ranks)], axis=1)
    full_BH = first_rank + order[:, : -state.num_pairs - 1 : -1]
    empty_BH = first_rank + order[:, : state.num_pairs]
    slots_full = full_BH[..., None] * state.places + state.looked_at
    slots_empty = empty_BH[..., None] * state.places + state.looked_at
    given = state.share[slots_full][..., :, None] - state.share[slots_empty][..., None, :]
    # The fuller of the two is lightest afterwards where what it gives is nearest to half their difference.
    load_full, load_empty = state.load[full_BH], state.load[empty_BH]
    given -= ((load_full - load_empty) / 2)[..., None, None]
    best = np.abs(given, out=given).reshape(*full_BH.shape, -1).argmin(axis=-1)
    source = full_BH * state.places + state.looked_at[best // len(state.looked_at)]
    target = empty_BH * state.places + state.looked_at[best % len(state.looked_at)]
    given = state.share[source] - state.share[target]
    helps = np.maximum(load_full - given, load_empty + given) < load_full
    source, target, given = source[helps], target[helps], given[helps]
    for values in (state.expert, state.share):
        values[source], values[target] = values[target], values[source]
    state.load[full_BH[helps]] -= given
    state.load[empty_BH[helps]] += given
    return helps.any(axis=1)
