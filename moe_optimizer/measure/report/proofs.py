"""Sums up what each process of a run wrote, in the rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.measure.report.inputs import Run
from moe_optimizer.plan.decision import Status
from moe_optimizer.proof.record import PassProof, Proof
from moe_optimizer.proof.verdict import model_holders


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """One pass in one process."""

    pass_name: str
    requested: str
    applied: bool
    ran: bool
    detail: str
    """Kernel, layers and calls, or why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRows:
    """One process that holds a part of the model."""

    title: str
    versions: str
    compilations: str
    """How much was compiled after it was ready; "" where nobody looked."""
    rows: tuple[PassRow, ...]


def workers(run: Run) -> tuple[WorkerRows, ...]:
    """Return each process that holds a part of the model, with the passes that the plan asks of it."""
    wanted = [decision.pass_name for decision in run.plan.decisions if decision.status is Status.ON]
    return tuple(_worker(proof, wanted) for proof in model_holders(run.proofs))


def _worker(proof: Proof, wanted: list[str]) -> WorkerRows:
    compiled = proof.compilations
    return WorkerRows(
        title=f"{proof.role} {proof.rank}, process {proof.pid}",
        versions=", ".join(f"{name} {version}" for name, version in sorted(proof.versions.items())),
        compilations="" if compiled is None else f"{compiled.before_ready} before ready, {compiled.after_ready} after",
        rows=tuple(_row(name, proof.passes[name]) for name in wanted if name in proof.passes),
    )


def _row(name: str, proof: PassProof) -> PassRow:
    facts = [proof.kernel, proof.isa, proof.found, proof.canary and f"canary {proof.canary}"]
    if proof.layers:
        errors = [layer.self_check_error for layer in proof.layers if layer.self_check_error is not None]
        facts.append(f"{len(proof.layers)} layers, {proof.calls:,} calls seen from Python")
        facts += [f"self-check at most {max(errors):.2f} of the allowed error"] if errors else []
    facts.append(proof.why_not)
    return PassRow(
        pass_name=name,
        requested=proof.requested,
        applied=proof.applied,
        ran=proof.ran,
        detail="; ".join(filter(None, facts)),
    )
