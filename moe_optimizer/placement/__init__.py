"""Places experts on ranks by their measured load. Pure numpy.

A rank is one device with whole experts; a replica is one copy of an expert on one rank; a placement is an array
[layers, replicas] of expert ids in rank order, `replicas / ranks` slots to each rank, as vLLM keeps it.
"""

from __future__ import annotations

from moe_optimizer.placement.balance import imbalance, moves, node_traffic, rank_loads
from moe_optimizer.placement.solver import place_experts

__all__ = ["imbalance", "moves", "node_traffic", "place_experts", "rank_loads"]
