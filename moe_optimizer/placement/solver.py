"""Places experts and their replicas on ranks."""

# L layers, E experts, S slots (replicas), R ranks, N nodes, G groups, B rows: one per layer and node.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_optimizer.errors import InputError
from moe_optimizer.placement.balance import groups_on_nodes, node_traffic, replica_counts, replica_loads
from moe_optimizer.placement.continuity import align_slots, names_near, renamed
from moe_optimizer.placement.exchange import Exchanged, exchange
from moe_optimizer.placement.packing import pack, replicate
from moe_optimizer.placement.rows import Floats, Ids, pick

_EVEN_ENOUGH = 1e-4
"""Chosen: a layer is left alone when its largest load is this close to the smallest possible one."""
_SAME_LOAD = 1e-3
"""Chosen: largest loads this close count as equal when moves can be saved; no step gets measurably slower."""
_MOST_LOAD = 1e30
"""Chosen: sums of it stay finite in float32."""
BLOCK_SLOTS = 24_000
"""Chosen: layers with so many slots are placed at a time. More together are slower, because they leave a core's cache;
fewer are slower too, because every step is taken for each block."""
BLOCK_LAYERS = 32
"""Chosen: but at least so many layers."""


@dataclass(frozen=True, slots=True)
class _Shape:
    num_ranks: int
    num_nodes: int
    num_groups: int

    @property
    def grouped(self) -> bool:
        """Whether each group of experts stays on one node."""
        return self.num_groups % self.num_nodes == 0

    @property
    def independent_nodes(self) -> int:
        """Nodes that share no expert, so that each is placed by itself; 1: all ranks are placed together."""
        return self.num_nodes if self.grouped else 1

    def traffic(self, load_LE: Floats, placement_LS: Ids) -> Floats:
        """See `node_traffic`."""
        return node_traffic(load_LE, placement_LS, self.num_nodes, self.num_groups)


def place_experts(  # noqa: PLR0917 - what vLLM's policy is given, in this order
    load: ArrayLike,
    num_ranks: int,
    num_replicas: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    previous: ArrayLike | None = None,
) -> Ids:
    """Return which expert each slot holds.

    Wanted, in this order, for each layer: a small largest rank load (never above that of vLLM's default policy, which
    is DeepSeek's EPLB), little traffic between nodes, few moves from `previous`. Where `num_groups` is a multiple of
    `num_nodes`, each group of experts stays on one node, as that policy has it.

    Args:
        load: [layers, experts] tokens of each expert; only ratios within a layer matter. A layer without load is
            placed as if its experts were equally busy.
        num_ranks: devices, a multiple of `num_nodes`; rank r is on node r // (num_ranks / num_nodes).
        num_replicas: slots, a multiple of `num_ranks`, at least one for each expert.
        num_nodes: machines with a fast network inside.
        num_groups: groups of neighbouring experts from which the router takes some; divides the experts.
        previous: [layers, replicas], the placement now. A layer in which it misses an expert is placed anew.

    Returns:
        [layers, replicas] expert ids, the slots of rank 0 first. The same arguments give the same placement on every
        machine.

    Raises:
        InputError: the numbers do not divide as said, or a load is negative, not a number or above 1e30.
    """
    load_LE = np.asarray(load, dtype=np.float64)
    _check(load_LE, num_ranks, num_replicas, num_nodes, num_groups)
    shape = _Shape(num_ranks, num_nodes, num_groups)
    load_LE = np.where(load_LE.any(axis=1, keepdims=True), load_LE, 1.0)
    old_LS = None if previous is None else np.asarray(previous, dtype=np.int64)
    if old_LS is not None and old_LS.shape != (len(load_LE), num_replicas):
        raise InputError(f"previous: got shape {old_LS.shape}, expected {(len(load_LE), num_replicas)}")
    block = max(BLOCK_LAYERS, BLOCK_SLOTS // num_replicas)
    parts = -(-len(load_LE) // block)
    loads = np.array_split(load_LE, parts)
    olds = [None] * parts if old_LS is None else np.array_split(old_LS, parts)
    return np.concatenate([_place(load, num_replicas, shape, old) for load, old in zip(loads, olds, strict=True)])


def _place(load_LE: Floats, num_replicas: int, shape: _Shape, old_LS: Ids | None) -> Ids:
    """As `place_experts`, for a few layers; every one of them has a load."""
    greedy_LS = _greedy(load_LE, num_replicas, shape)
    if old_LS is not None:
        return _near(old_LS, greedy_LS, load_LE, shape)
    exchanged = _exchange(load_LE, greedy_LS, shape, _EVEN_ENOUGH)
    return _gather_groups(load_LE, exchanged.placement, shape)


def _check(load_LE: Floats, num_ranks: int, num_replicas: int, num_nodes: int, num_groups: int) -> None:
    if load_LE.ndim != 2 or not load_LE.size:
        raise InputError(f"load: got shape {load_LE.shape}, expected [layers, experts]")
    if not ((load_LE >= 0) & (load_LE <= _MOST_LOAD)).all():
        raise InputError(f"load: expected numbers from 0 to {_MOST_LOAD:g}")
    num_experts = load_LE.shape[1]
    for name, value, divisor_name, divisor in (
        ("num_ranks", num_ranks, "num_nodes", num_nodes),
        ("num_replicas", num_replicas, "num_ranks", num_ranks),
        ("experts", num_experts, "num_groups", num_groups),
    ):
        if divisor < 1 or value < 1 or value % divisor:
            raise InputError(f"{name}: got {value}, expected a multiple of {divisor_name} {divisor}")
    if num_replicas < num_experts:
        raise InputError(f"num_replicas: got {num_replicas}, expected at least one for each of {num_experts} experts")


def _greedy(load_LE: Floats, num_slots: int, shape: _Shape) -> Ids:
    """Return a placement with the loads of vLLM's default policy; see `packing`. That policy computes from float32."""
    nodes = shape.independent_nodes
    expert_BE = _experts_of_nodes(load_LE, nodes, shape.num_groups if shape.grouped else 1)
    load_BE = pick(np.repeat(load_LE, nodes, axis=0), expert_BE)
    load_BE = load_BE.astype(np.float32).astype(np.float64)
    local_BS, counts_BE = replicate(load_BE, num_slots // nodes)
    share_BS = pick(load_BE / counts_BE, local_BS)
    local_BS = pick(local_BS, pack(share_BS, shape.num_ranks // nodes))
    return pick(expert_BE, local_BS).reshape(len(load_LE), num_slots)


def _experts_of_nodes(load_LE: Floats, num_nodes: int, num_groups: int) -> Ids:
    """Return the experts of each node, whole groups, [L * N, E / N]; the groups are packed by load.

    In float32 and in this order of experts, because vLLM's policy has them so: groups of equal load stay equal.
    """
    layers, num_experts = load_LE.shape
    size = num_experts // num_groups
    load_LG = load_LE.astype(np.float32).reshape(layers, num_groups, size).sum(axis=-1)
    group_LG = pack(load_LG, num_nodes)
    return (group_LG[..., None] * size + np.arange(size)).reshape(layers * num_nodes, -1)


def _exchange(load_LE: Floats, placement_LS: Ids, shape: _Shape, slack: float | Floats) -> Exchanged:
    """Exchange replicas within each node, or among all ranks where groups are not kept on nodes; see `exchange`.

    A layer is done when its largest load is above the smallest that exchanges may reach by at most the share `slack`.

    Returns:
        The placement and its largest loads by layer: [L, S] and [L].
    """
    layers, nodes = len(load_LE), shape.independent_nodes
    ranks = shape.num_ranks // nodes
    share_BS = replica_loads(load_LE, placement_LS).reshape(layers * nodes, -1)
    # Of all nodes: a layer waits for the fullest one, so the others need not be any lighter.
    least_B = np.maximum(share_BS.sum(axis=1) / ranks, share_BS.max(axis=1))
    enough_L = least_B.reshape(layers, nodes).max(axis=1) * (1 + slack)
    done = exchange(placement_LS.reshape(share_BS.shape), share_BS, ranks, np.repeat(enough_L, nodes))
    before, after = (each.reshape(layers, nodes).max(axis=1) for each in (done.largest_before, done.largest))
    return Exchanged(done.placement.reshape(placement_LS.shape), before, after)


def _gather_groups(load_LE: Floats, placement: Ids, shape: _Shape) -> Ids:
    """Reorder the ranks of each layer so that those whose load is of the same group share a node, where that helps."""
    if shape.grouped or shape.num_groups == 1:
        return placement
    layers, num_experts = load_LE.shape
    group_size = num_experts // shape.num_groups
    of_rank = placement.reshape(layers, shape.num_ranks, -1)
    share = pick(load_LE, placement).reshape(of_rank.shape)
    load_LRG = np.zeros((layers, shape.num_ranks, shape.num_groups))
    layer, rank = np.ogrid[:layers, : shape.num_ranks]
    np.add.at(load_LRG, (layer[..., None], rank[..., None], of_rank // group_size), share)
    order = np.argsort(load_LRG.argmax(axis=-1), axis=1, kind="stable")
    gathered = np.take_along_axis(of_rank, order[..., None], axis=1).reshape(placement.shape)
    less = shape.traffic(load_LE, gathered) < shape.traffic(load_LE, placement)
    return np.where(less[:, None], gathered, placement)


def _near(old_LS: Ids, greedy_LS: Ids, load_LE: Floats, shape: _Shape) -> Ids:
    """Return for each layer the placement with the fewest moves of three that are as good as equal.

    In this order: the old one as it is, the old one after exchanges, the new one renamed to be near the old one. An
    old one is as good when its largest load is within 0.1 % of the new one's and not above the greedy placement's,
    which is the default policy's, and when it has no more traffic between nodes.
    """
    layers, num_experts = load_LE.shape
    usable = _usable(old_LS, num_experts, shape)
    old_LS = np.where(usable[:, None], old_LS, greedy_LS)
    # In one call: half the steps.
    load_2LE = np.concatenate((load_LE, load_LE))
    slack_2L = np.repeat((_EVEN_ENOUGH, _SAME_LOAD), layers)
    both = _exchange(load_2LE, np.concatenate((greedy_LS, old_LS)), shape, slack_2L)
    new_LS, exchanged_LS = both.placement.reshape(2, layers, -1)
    new_LS = _gather_groups(load_LE, new_LS, shape)
    (greedy_L, old_L), (new_L, exchanged_L) = both.largest_before.reshape(2, -1), both.largest.reshape(2, -1)
    limit_L = np.minimum(greedy_L, new_L * (1 + _SAME_LOAD))
    chosen, far = new_LS.copy(), np.ones(layers, dtype=bool)
    for candidate, largest_L in ((exchanged_LS, exchanged_L), (old_LS, old_L)):
        good = largest_L <= limit_L
        if not shape.grouped:
            good &= shape.traffic(load_LE, candidate) <= shape.traffic(load_LE, new_LS)
        chosen[good] = candidate[good]
        far &= ~good
    if far.any():
        chosen[far] = _rename(new_LS[far], old_LS[far], num_experts, shape)
    return chosen


def _usable(old_LS: Ids, num_experts: int, shape: _Shape) -> NDArray[np.bool_]:
    """Return which layers of an earlier placement hold every expert, and whole groups on nodes where that is wanted."""
    known = np.all((old_LS >= 0) & (old_LS < num_experts), axis=1)
    safe = np.where(known[:, None], old_LS, 0)
    usable = known & np.all(replica_counts(safe, num_experts) > 0, axis=1)
    if shape.independent_nodes > 1:
        held = groups_on_nodes(safe, num_experts, shape.num_nodes, shape.num_groups)
        usable &= np.all(held.sum(axis=1) == 1, axis=1)
    return usable


def _rename(new_LS: Ids, old_LS: Ids, num_experts: int, shape: _Shape) -> Ids:
    """Rename nodes, ranks within a node, and slots within a rank to be near the old placement.

    Names are found greedily, and from one old place of each expert. Where the names that were there save more moves,
    they stay.
    """
    layers, nodes = len(new_LS), shape.num_nodes if shape.num_groups > 1 else 1
    unnamed_LS = new_LS
    if nodes > 1:
        by_node = (layers, nodes, -1)
        new_items, old_items = new_LS, old_LS
        if shape.grouped:
            new_items, old_items = (_groups_of_nodes(each, num_experts, shape) for each in (new_LS, old_LS))
        names = names_near(new_items.reshape(by_node), old_items.reshape(by_node), num_experts)
        new_LS = renamed(new_LS.reshape(by_node), names)
    by_rank = (layers * nodes, shape.num_ranks // nodes, -1)
    new_BRP, old_BRP = new_LS.reshape(by_rank), old_LS.reshape(by_rank)
    new_BRP = renamed(new_BRP, names_near(new_BRP, old_BRP, num_experts))
    slots = (layers * shape.num_ranks, -1)
    near_LS, unnamed_LS = (
        align_slots(each.reshape(slots), old_LS.reshape(slots)).reshape(old_LS.shape) for each in (new_BRP, unnamed_LS)
    )
    fewer = np.count_nonzero(unnamed_LS != old_LS, axis=1) < np.count_nonzero(near_LS != old_LS, axis=1)
    return np.where(fewer[:, None], unnamed_LS, near_LS)


def _groups_of_nodes(placement_LS: Ids, num_experts: int, shape: _Shape) -> Ids:
    """Return the groups of each node, where each group is on one: [L, N * G / N]."""
    held_LNG = groups_on_nodes(placement_LS, num_experts, shape.num_nodes, shape.num_groups)
    return held_LNG.nonzero()[2].reshape(len(placement_LS), -1)
