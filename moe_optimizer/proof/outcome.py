"""The outcome of a run: what its servers prove, and what the launcher observed, held against the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.table import Row, compiled_after_ready, joined_rows, proof_rows, render_table
from moe_optimizer.proof.verdict import Observed, kernels_in_use, not_running


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a plan."""

    rows: tuple[Row, ...]
    """requested / applied / ran / why not, one row for each pass, over all servers."""
    kernels: tuple[str, ...]
    """Each kernel that ran, once."""
    compilations: tuple[str, ...]
    """In a line how much was compiled after ready; () where nobody counts."""
    missing: tuple[str, ...]
    """"PASS: REASON" for each required pass that does not run on every server; of several servers, it names the one."""

    def lines(self, *, width: int) -> tuple[str, ...]:
        """Return the table, the kernels and the compilations as text, with an empty line before and after."""
        table = render_table(self.rows, width=width).splitlines()
        return ("", *table, *(f"kernel: {kernel}" for kernel in self.kernels), *self.compilations, "")

    def require(self, *, hint: str) -> None:
        """Check that every required pass runs.

        Raises:
            RequiredNotAppliedError: one does not.
        """
        if self.missing:
            raise RequiredNotAppliedError(f"required, but not running: {'; '.join(self.missing)}", hint=hint)


def judge(
    plan: Plan,
    proofs: Mapping[str, Sequence[Proof]],
    required: Collection[str],
    *,
    absent: str,
    observed: Mapping[str, Observed],
    decoded: Mapping[str, str] = MappingProxyType({}),
    unless_no_faster: Collection[str] = (),
) -> Outcome:
    """Return the outcome of a run.

    Args:
        plan: what was requested.
        proofs: server -> what its processes wrote.
        required: names of the passes that must run on every server.
        absent: why a server may have written no proof at all.
        observed: pass name -> what the launcher observed of it.
        decoded: server -> what the launcher's decode check says; it stands beside the canary.
        unless_no_faster: those of `required` that workers may leave which timed them no faster than vLLM's own.
    """
    missing: dict[str, None] = {}
    for server, written in proofs.items():
        reasons = not_running(
            plan, written, required, absent=absent, observed=observed, unless_no_faster=unless_no_faster
        )
        prefix = f"{server}: " if len(proofs) > 1 else ""
        missing |= {f"{prefix}{name}: {reason}": None for name, reason in sorted(reasons.items())}
    tables = {
        server: _with_decoded(plan, proof_rows(plan, written, absent=absent, observed=observed), decoded.get(server))
        for server, written in proofs.items()
    }
    every = [proof for written in proofs.values() for proof in written]
    return Outcome(
        rows=joined_rows(tables),
        kernels=kernels_in_use(every),
        compilations=compiled_after_ready(every),
        missing=tuple(missing),
    )


def _with_decoded(plan: Plan, rows: tuple[Row, ...], outcome: str | None) -> tuple[Row, ...]:
    """Return the rows of a server with the outcome of its decode check behind the canary of the experts."""
    ours = {each.pass_name for each in plan.plugin_decisions if isinstance(each.params, FlashDmoeParams)}
    if not outcome:
        return rows
    return tuple(
        replace(row, canary="; ".join(filter(None, (row.canary, outcome)))) if row.pass_name in ours else row
        for row in rows
    )
