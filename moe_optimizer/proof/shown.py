"""Names the decisions whose outcome vLLM's workers write into their proofs."""

from __future__ import annotations

from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.plan import Plan


def flag_decisions(plan: Plan) -> tuple[Decision, ...]:
    """Return the decisions that workers show although vLLM carries them out: by its arguments, or an FP8 checkpoint."""
    return tuple(
        decision
        for decision in plan.decisions
        if decision.status is Status.ON and decision.applier is not Applier.PLUGIN and shown_by_workers(decision)
    )


def serves_fp8_checkpoint(decision: Decision) -> bool:
    """Return whether a decision is to serve an FP8 checkpoint as it is."""
    return decision.pass_name == "fp8" and decision.status is Status.ON and decision.params is None


def shown_by_workers(decision: Decision) -> bool:
    """Return whether the workers' proofs tell the outcome of a decision that is on."""
    return decision.applier in (Applier.PLUGIN, Applier.FLAGS) or serves_fp8_checkpoint(decision)
