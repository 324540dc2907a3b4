"""Shows the Plan beside the Proof: a row for each pass with requested, applied, ran and why not."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_optimizer.errors import printable
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import LayerProof, Proof
from moe_optimizer.proof.shown import serves_fp8_checkpoint
from moe_optimizer.proof.verdict import (
    NO_WORKER,
    NOTHING_OBSERVED,
    Observed,
    layers_left,
    model_holders,
    shown_by_workers,
    why_not_running,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pass of the plan in the table."""

    pass_name: str
    requested: str
    """The decision's value, or its status where it is not on."""
    applied: str
    """"yes", "no", "by flags", "2 of 4 workers" or "-"."""
    ran: str
    """As `applied`, with the number of layers or another detail from the workers; "-" for what is not proven."""
    why_not: str
    canary: str = ""
    """Outcome of the check of the kernels through the server's own layers, and of the decode check; "" where none."""
    why_on: str = ""
    """Why the plan has it on; "" where it has not."""


_NARROWEST = 10
"""Chosen: columns of words stay readable down to here."""
HEADINGS = ("pass", "requested", "applied", "ran", "why not")


def proof_rows(
    plan: Plan,
    proofs: Sequence[Proof],
    *,
    absent: str = NO_WORKER,
    observed: Mapping[str, Observed] = NOTHING_OBSERVED,
) -> tuple[Row, ...]:
    """Return one row for each decision of the plan, in its order.

    Args:
        plan: what was requested.
        proofs: those of one server.
        absent: why there is no proof at all.
        observed: pass name -> what the launcher observed of it.
    """
    return tuple(_row(plan, decision, proofs, absent, observed) for decision in plan.decisions)


def joined_rows(tables: Mapping[str, Sequence[Row]]) -> tuple[Row, ...]:
    """Return the rows of several servers as one table; where they differ, a cell names the servers.

    Args:
        tables: server -> its rows; the same passes in the same order.
    """
    return tuple(_joined(dict(zip(tables, rows, strict=True))) for rows in zip(*tables.values(), strict=True))


def _joined(rows: Mapping[str, Row]) -> Row:
    def cell(name: str) -> str:
        values = {server: getattr(row, name) for server, row in rows.items()}
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return "; ".join(f"{server}: {value}" for server, value in values.items() if value)

    first = next(iter(rows.values()))
    return dataclasses.replace(first, **{name: cell(name) for name in ("applied", "ran", "why_not", "canary")})


def _row(plan: Plan, decision: Decision, proofs: Sequence[Proof], absent: str, observed: Mapping[str, Observed]) -> Row:
    requested = decision.value if decision.status is Status.ON else decision.status.value
    if decision.status is not Status.ON:
        return Row(pass_name=decision.pass_name, requested=requested, applied="-", ran="-", why_not=decision.reason)
    by_us = decision.applier is Applier.PLUGIN
    applied = "yes" if decision.applier is Applier.NONE else f"by {decision.applier.value}"
    seen = observed.get(decision.pass_name, Observed(ran="-"))
    if not shown_by_workers(decision) or not (proofs or by_us):
        return Row(
            pass_name=decision.pass_name, requested=requested, applied=applied, ran=seen.ran, why_not=seen.why_not,
            why_on=decision.reason,
        )  # fmt: skip
    entries = [proof.passes.get(decision.pass_name) for proof in model_holders(proofs)]
    ran = "no" if seen.why_not else _share([bool(entry and entry.ran) for entry in entries])
    layers = max((entry.layers for entry in entries if entry), key=len, default=())
    found = sorted({entry.found for entry in entries if entry and entry.found})
    if layers:
        found = [f"{len(layers)} layers", *_gates(layers)]
    if decision.pass_name in observed:
        found.append(seen.ran.removeprefix("yes, "))
    by_flags = decision.applier is Applier.FLAGS and not serves_fp8_checkpoint(decision)
    return Row(
        pass_name=decision.pass_name,
        requested=requested,
        applied=applied if by_flags else _share([bool(e and e.applied) for e in entries]),
        ran=ran if ran == "no" else ", ".join((ran, *found)),
        why_not=why_not_running(plan, decision, proofs, absent) or seen.why_not or layers_left(decision, proofs),
        canary=_canary([entry.canary for entry in entries if entry and entry.canary]),
        why_on=decision.reason,
    )


def _gates(layers: Sequence[LayerProof]) -> tuple[str, ...]:
    """Return in how many layers one launch chose the experts, and why not in others; () where it was not asked for."""
    asked = [layer for layer in layers if layer.router]
    if not asked:
        return ()
    reasons = dict.fromkeys(layer.router for layer in asked if not layer.router.startswith("gate_topk"))
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return (f"gate_topk in {sum(layer.router_calls > 0 for layer in asked)}{why}",)


def _canary(outcomes: Sequence[str]) -> str:
    """Return the outcomes of several workers as one: those that did not pass, or the first one's for all."""
    others = dict.fromkeys(outcome for outcome in outcomes if not outcome.startswith("passed"))
    if others or not outcomes:
        return "; ".join(others)
    return outcomes[0] if len(outcomes) == 1 else f"{outcomes[0]}; {len(outcomes) - 1} more workers passed"


def _share(answers: Sequence[bool]) -> str:
    if not answers or not any(answers):
        return "no"
    if all(answers):
        return "yes" if len(answers) == 1 else f"yes, {len(answers)} workers"
    return f"{sum(answers)} of {len(answers)} workers"


def render_table(rows: Sequence[Row], *, width: int = 80) -> str:
    """Return the table as text of at most `width` columns. Lines below it have the outcome of the canary, and for each
    pass the reason why it is on or off, which the plan has in full.
    """
    shown = [row for row in rows if row.requested != Status.OFF.value]
    cells = [tuple(map(printable, dataclasses.astuple(row)))[: len(HEADINGS)] for row in shown]
    limits = (18, 24, 16, 16)
    sizes = [min(limit, max(len(line[i]) for line in [HEADINGS, *cells])) for i, limit in enumerate(limits)]
    least = 16 if any(cell[-1] for cell in cells) else len(HEADINGS[-1])
    # A pass's name stays whole; the widest of the others gives way.
    while sum(sizes) + 2 * len(sizes) + least > width and max(sizes[1:]) > _NARROWEST:
        sizes[sizes.index(max(sizes[1:]), 1)] -= 1
    sizes.append(max(least, width - sum(sizes) - 2 * len(sizes)))
    lines = []
    for line in [HEADINGS, tuple("-" * min(size, 24) for size in sizes), *cells]:
        lines.extend(_wrapped(line, sizes))
    for row in shown:
        if row.canary:
            text = printable(f"canary of {row.pass_name}: {row.canary}")
            lines += ["", *textwrap.wrap(text, width, subsequent_indent="     ")]
    reasons = [f"{row.pass_name} on: {printable(row.why_on)}" for row in rows if row.why_on]
    reasons += [f"{row.pass_name} off: {printable(row.why_not)}" for row in rows if row.requested == Status.OFF.value]
    if reasons:
        lines += ["", *(textwrap.shorten(line, width, placeholder=" ...") for line in reasons)]
    return "\n".join(lines)


def compiled_after_ready(proofs: Iterable[Proof]) -> tuple[str, ...]:
    """Return in a line how much the workers compiled after they were ready; () where nobody counts."""
    counts = [proof.compilations.after_ready for proof in model_holders(proofs) if proof.compilations is not None]
    return (f"compiled after ready: {sum(counts)}",) if counts else ()


def _wrapped(cells: Sequence[str], sizes: Sequence[int]) -> list[str]:
    columns = [textwrap.wrap(cell, size) or [""] for cell, size in zip(cells, sizes, strict=True)]
    height = max(len(column) for column in columns)
    padded = [column + [""] * (height - len(column)) for column in columns]
    return [
        "  ".join(part.ljust(size) for part, size in zip(parts, sizes, strict=True)).rstrip()
        for parts in zip(*padded, strict=True)
    ]
