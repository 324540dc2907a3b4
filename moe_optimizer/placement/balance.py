"""Measures a placement: the load of each rank, the traffic between nodes, the moves from another placement."""

# L layers, E experts, S slots (replicas), R ranks, N nodes, G groups.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_optimizer.placement.continuity import align_slots
from moe_optimizer.placement.rows import Floats, Ids, flat_positions


def replica_counts(placement_LS: Ids, num_experts: int) -> Ids:
    """Return how many replicas each expert has: [L, E]."""
    size = len(placement_LS) * num_experts
    counts = np.bincount(flat_positions(placement_LS, num_experts).ravel(), minlength=size)
    return counts.reshape(-1, num_experts)


def replica_loads(load_LE: Floats, placement_LS: Ids) -> Floats:
    """Return the tokens of each slot: [L, S]. An expert's tokens are shared evenly by its replicas, as vLLM does."""
    flat = flat_positions(placement_LS, load_LE.shape[1])
    # As floats: dividing by integers takes three times as long.
    counts = np.bincount(flat.ravel(), minlength=load_LE.size).astype(np.float64)
    return (load_LE.ravel() / np.maximum(counts, 1.0, out=counts)).take(flat)


def rank_loads(load_LE: Floats, placement_LS: Ids, num_ranks: int) -> Floats:
    """Return the tokens of each rank: [L, R]."""
    return replica_loads(load_LE, placement_LS).reshape(len(placement_LS), num_ranks, -1).sum(axis=-1)


def imbalance(load_LE: Floats, placement_LS: Ids, num_ranks: int) -> float:
    """Return the tokens of the fullest rank over those of the average one, all layers together; 1 is even.

    Layers run one after the other and each waits for its fullest rank, so the largest loads are added up over the
    layers before they are divided. Without any load it is 1.
    """
    loads = rank_loads(load_LE, placement_LS, num_ranks)
    mean = loads.mean(axis=1).sum()
    return float(loads.max(axis=1).sum() / mean) if mean else 1.0


def node_traffic(load_LE: Floats, placement_LS: Ids, num_nodes: int, num_groups: int) -> Floats:
    """Return the tokens that go to nodes, at most: [L].

    A token of an expert group may need every node that holds an expert of the group, so a group counts once for each
    such node. With one group this is the same for every placement: without groups nothing is known of which experts a
    token takes together, and vLLM picks replicas by hash, not by distance.
    """
    load_LG = load_LE.reshape(len(load_LE), num_groups, -1).sum(axis=-1)
    nodes_LG = groups_on_nodes(placement_LS, load_LE.shape[1], num_nodes, num_groups).sum(axis=1)
    return (nodes_LG * load_LG).sum(axis=-1)


def groups_on_nodes(placement_LS: Ids, num_experts: int, num_nodes: int, num_groups: int) -> NDArray[np.bool_]:
    """Return which node holds an expert of which group: [L, N, G]."""
    layers = len(placement_LS)
    group_of_slot = (placement_LS // (num_experts // num_groups)).reshape(layers, num_nodes, -1)
    held = np.zeros((layers, num_nodes, num_groups), dtype=bool)
    held[np.arange(layers)[:, None, None], np.arange(num_nodes)[None, :, None], group_of_slot] = True
    return held


def moves(previous_LS: Ids, placement_LS: Ids, num_ranks: int) -> int:
    """Return how many experts' weights ranks must receive to get from one placement to the other."""
    layers = len(placement_LS)
    old = previous_LS.reshape(layers * num_ranks, -1)
    new = align_slots(placement_LS.reshape(layers * num_ranks, -1), old)
    return int((new != old).sum())
