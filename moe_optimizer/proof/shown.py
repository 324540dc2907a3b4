"""Names the decisions whose outcome vLLM's workers write into their proofs."""

from __future__ import annotations

from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.plan import Plan

FLAG_PASSES = ("parallelism", "dual_batch_overlap", "scheduler", "graph_capture", "kv_cache", "fp8")
"""Passes that vLLM carries out by its arguments, and whose effect its workers show."""


def flag_decisions(plan: Plan) -> tuple[Decision, ...]:
    """Return the decisions that workers show although vLLM carries them out: by its arguments, or an FP8 checkpoint."""
    return tuple(
        decision
        for decision in plan.decisions
        if decision.status is Status.ON and (is_shown_flag(decision) or serves_fp8_checkpoint(decision))
    )


def is_shown_flag(decision: Decision) -> bool:
    """Return whether vLLM's arguments carry a decision out and workers show their effect."""
    return decision.applier is Applier.FLAGS and decision.pass_name in FLAG_PASSES


def serves_fp8_checkpoint(decision: Decision) -> bool:
    """Return whether a decision is to serve an FP8 checkpoint as it is."""
    return decision.applier is Applier.NONE and decision.pass_name == "fp8" and decision.status is Status.ON


def shown_by_workers(decision: Decision) -> bool:
    """Return whether the workers' proofs tell the outcome of a decision."""
    return decision.applier is Applier.PLUGIN or is_shown_flag(decision) or serves_fp8_checkpoint(decision)
