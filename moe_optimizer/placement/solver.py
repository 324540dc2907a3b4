"""Places experts and their replicas on ranks."""

# L layers, E experts, S slots (replicas), R ranks, N nodes, G groups, B rows: one per layer and node.
# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_optimizer.errors import InputError
from moe_optimizer.placement.balance import groups_on_nodes, node_traffic, replica_counts
from moe_optimizer.placement.continuity import align_slots, rename_units
from moe_optimizer.placement.exchange import exchange
from moe_optimizer.placement.packing import pack, replicate

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_SAME_LOAD = 1e-3
"""Chosen: largest loads this close count as equal when moves can be saved; no step gets measurably slower."""
_MOST_LOAD = 1e30
"""Chosen: sums of it stay finite in float32."""


@dataclass(frozen=True, slots=True)
class _Shape:
    num_ranks: int
    num_nodes: int
    num_groups: int

    @property
    def grouped(self) -> bool:
        """Whether each group of experts stays on one node."""
        return self.num_groups % self.num_nodes == 0

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
        [layers, replicas] expert ids, the slots of rank 0 first. The same arguments give the same placement.

    Raises:
        InputError: the numbers do not divide as said, or a load is negative, not a number or above 1e30.
    """
    load_LE = np.asarray(load, dtype=np.float64)
    _check(load_LE, num_ranks, num_replicas, num_nodes, num_groups)
    shape = _Shape(num_ranks, num_nodes, num_groups)
    nodes, groups = (num_nodes, num_groups) if shape.grouped else (1, 1)
    load_LE = np.where(load_LE.any(axis=1, keepdims=True), load_LE, 1.0)
    expert_BE = _experts_of_nodes(load_LE, nodes, groups)
    load_BE = np.take_along_axis(np.repeat(load_LE, nodes, axis=0), expert_BE, axis=1)
    greedy_BS = _greedy(load_BE, num_replicas // nodes, num_ranks // nodes)
    local = exchange(load_BE, greedy_BS, num_ranks // nodes)
    placement = np.take_along_axis(expert_BE, local.placement, axis=1).reshape(len(load_LE), num_replicas)
    if not shape.grouped and num_groups > 1:
        placement = _gather_groups(load_LE, placement, shape)
    if previous is None:
        return placement
    old_LS = np.asarray(previous, dtype=np.int64)
    if old_LS.shape != placement.shape:
        raise InputError(f"previous: got shape {old_LS.shape}, expected {placement.shape}")
    # Never above the greedy placement's, which is the default policy's.
    largest_L = local.largest.reshape(len(load_LE), nodes).max(axis=1)
    greedy_L = local.largest_before.reshape(len(load_LE), nodes).max(axis=1)
    return _near(old_LS, placement, np.minimum(greedy_L, largest_L * (1 + _SAME_LOAD)), load_LE, shape)


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


def _experts_of_nodes(load_LE: Floats, num_nodes: int, num_groups: int) -> Ids:
    """Return the experts of each node, whole groups, [L * N, E / N]; the groups are packed by load.

    In float32 and in this order of experts, because vLLM's policy has them so: ties are then broken as there.
    """
    layers, num_experts = load_LE.shape
    size = num_experts // num_groups
    load_LG = load_LE.astype(np.float32).reshape(layers, num_groups, size).sum(axis=-1)
    group_LG = pack(load_LG, num_nodes)
    return (group_LG[..., None] * size + np.arange(size)).reshape(layers * num_nodes, -1)


def _greedy(load_BE: Floats, num_slots: int, num_ranks: int) -> Ids:
    """Return a placement with the loads of vLLM's default policy; see `packing`. That policy computes from float32."""
    load_BE = load_BE.astype(np.float32).astype(np.float64)
    expert_BS, counts_BE = replicate(load_BE, num_slots)
    share_BS = np.take_along_axis(load_BE / counts_BE, expert_BS, axis=1)
    return np.take_along_axis(expert_BS, pack(share_BS, num_ranks), axis=1)


def _gather_groups(load_LE: Floats, placement: Ids, shape: _Shape) -> Ids:
    """Reorder the ranks of each layer so that those whose load is of the same group share a node, where that helps."""
    layers, num_experts = load_LE.shape
    group_size = num_experts // shape.num_groups
    of_rank = placement.reshape(layers, shape.num_ranks, -1)
    share = np.take_along_axis(load_LE, placement, axis=1).reshape(of_rank.shape)
    load_LRG = np.zeros((layers, shape.num_ranks, shape.num_groups))
    layer, rank = np.ogrid[:layers, : shape.num_ranks]
    np.add.at(load_LRG, (layer[..., None], rank[..., None], of_rank // group_size), share)
    order = np.argsort(load_LRG.argmax(axis=-1), axis=1, kind="stable")
    gathered = np.take_along_axis(of_rank, order[..., None], axis=1).reshape(placement.shape)
    less = shape.traffic(load_LE, gathered) < shape.traffic(load_LE, placement)
    return np.where(less[:, None], gathered, placement)


def _near(old_LS: Ids, new_LS: Ids, limit_L: Floats, load_LE: Floats, shape: _Shape) -> Ids:
    """Return for each layer the placement with the fewest moves of three that are as good as equal.

    In this order: the old one as it is, the old one after exchanges, the new one renamed to be near the old one. An
    old one is as good when its largest load is at most `limit_L` and it has no more traffic between nodes.
    """
    layers, num_experts = load_LE.shape
    usable = _usable(old_LS, num_experts, shape)
    old_LS = np.where(usable[:, None], old_LS, new_LS)
    nodes = shape.num_nodes if shape.grouped else 1
    by_node = old_LS.reshape(layers * nodes, -1)
    exchanged = exchange(np.repeat(load_LE, nodes, axis=0), by_node, shape.num_ranks // nodes)
    chosen, far = new_LS.copy(), np.ones(layers, dtype=bool)
    for candidate, largest in (
        (exchanged.placement.reshape(old_LS.shape), exchanged.largest),
        (old_LS, exchanged.largest_before),
    ):
        good = largest.reshape(layers, nodes).max(axis=1) <= limit_L
        if not shape.grouped:
            good &= shape.traffic(load_LE, candidate) <= shape.traffic(load_LE, new_LS)
        chosen[good] = candidate[good]
        far &= ~good
    if far.any():
        chosen[far] = _rename(new_LS[far], old_LS[far], num_experts, shape)
    rows = layers * shape.num_ranks
    return align_slots(chosen.reshape(rows, -1), old_LS.reshape(rows, -1)).reshape(chosen.shape)


def _usable(old_LS: Ids, num_experts: int, shape: _Shape) -> NDArray[np.bool_]:
    """Return which layers of an earlier placement hold every expert, and whole groups on nodes where that is wanted."""
    known = np.all((old_LS >= 0) & (old_LS < num_experts), axis=1)
    safe = np.where(known[:, None], old_LS, 0)
    usable = known & np.all(replica_counts(safe, num_experts) > 0, axis=1)
    if shape.grouped:
        held = groups_on_nodes(safe, num_experts, shape.num_nodes, shape.num_groups)
        usable &= np.all(held.sum(axis=1) == 1, axis=1)
    return usable


def _rename(new_LS: Ids, old_LS: Ids, num_experts: int, shape: _Shape) -> Ids:
    """Rename nodes, and ranks within a node, to be near the old placement; without groups nodes do not matter."""
    nodes = shape.num_nodes if shape.num_groups > 1 else 1
    if nodes > 1:
        by_node = (len(new_LS), nodes, -1)
        new_LS = rename_units(new_LS.reshape(by_node), old_LS.reshape(by_node), num_experts)
    by_rank = (len(old_LS) * nodes, shape.num_ranks // nodes, -1)
    return rename_units(new_LS.reshape(by_rank), old_LS.reshape(by_rank), num_experts).reshape(old_LS.shape)
