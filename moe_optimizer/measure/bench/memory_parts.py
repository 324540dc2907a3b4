"""Puts what workers found of their memory beside what was planned."""

from __future__ import annotations

from collections.abc import Sequence

from moe_optimizer.measure.bench.result import MemoryPart
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.proof.record import Proof


def memory_parts(plan: MemoryPlan, proofs: Sequence[Proof]) -> tuple[MemoryPart, ...]:
    """Return the parts that workers tell; of several workers the fullest, for which the plan is made."""
    found = [proof.memory for proof in proofs if proof.memory is not None]
    if not found:
        return ()
    weights, cache = max(each.weight_bytes for each in found), max(each.kv_cache_bytes for each in found)
    parts = [
        MemoryPart(part="weights", planned_bytes=plan.weight_bytes, found_bytes=weights),
        MemoryPart(part="cache", planned_bytes=plan.kv_cache_bytes, found_bytes=cache),
    ]
    activations = [each.activation_bytes for each in found if each.activation_bytes is not None]
    workspaces = [each.workspace_bytes for each in found if each.workspace_bytes is not None]
    if activations:
        measured = max(activations)
        parts.append(MemoryPart(part="activations", planned_bytes=plan.activation_bytes, found_bytes=measured))
    if workspaces:
        # Where nobody tells activations apart they are in it.
        part, planned = "workspace", plan.workspace_bytes
        if not activations:
            part, planned = "activations and workspace", plan.activation_bytes + plan.workspace_bytes
        parts.append(MemoryPart(part=part, planned_bytes=planned, found_bytes=max(workspaces)))
    return tuple(parts)
