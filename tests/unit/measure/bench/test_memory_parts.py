"""What the fullest worker found of its memory, beside what was planned."""

from __future__ import annotations

from typing import Any

import pytest

from moe_optimizer.measure.bench.memory_parts import memory_parts
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.proof.record import MemoryProof, Proof
from tests.builders import cpu_machine, made_plan, tiny_moe


@pytest.fixture
def plan() -> MemoryPlan:
    return made_plan(tiny_moe(), cpu_machine()).memory


def worker(**parts: int) -> Proof:
    sizes: dict[str, Any] = {"weight_bytes": 1, "kv_cache_bytes": 1, "activation_bytes": None, **parts}
    return Proof(role="worker", rank=0, pid=1, plan_digest="", versions={}, memory=MemoryProof(**sizes))


def test_of_several_workers_the_fullest_counts(plan: MemoryPlan) -> None:
    parts = memory_parts(plan, [worker(weight_bytes=5, kv_cache_bytes=2), worker(weight_bytes=4, kv_cache_bytes=3)])
    assert [(each.part, each.planned_bytes, each.found_bytes) for each in parts] == [
        ("weights", plan.weight_bytes, 5),
        ("cache", plan.kv_cache_bytes, 3),
    ]


def test_activations_and_workspace_stand_beside_what_was_planned_of_each(plan: MemoryPlan) -> None:
    parts = memory_parts(plan, [worker(activation_bytes=7, workspace_bytes=9)])
    assert [(each.part, each.planned_bytes, each.found_bytes) for each in parts[2:]] == [
        ("activations", plan.activation_bytes, 7),
        ("workspace", plan.workspace_bytes, 9),
    ]


def test_where_nobody_tells_activations_apart_both_stand_together(plan: MemoryPlan) -> None:
    (part,) = memory_parts(plan, [worker(workspace_bytes=9)])[2:]
    assert part.part == "activations and workspace"
    assert (part.planned_bytes, part.found_bytes) == (plan.activation_bytes + plan.workspace_bytes, 9)


def test_a_worker_that_says_nothing_has_no_parts(plan: MemoryPlan) -> None:
    silent = Proof(role="worker", rank=0, pid=1, plan_digest="", versions={})
    assert memory_parts(plan, [silent]) == ()
