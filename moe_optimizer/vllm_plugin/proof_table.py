"""Plan against Proof: what was requested, what is applied, what ran, and why not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moe_optimizer.errors import printable
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.vllm_plugin.experts.weight_format import FORMAT_PARAM
from moe_optimizer.vllm_plugin.flag_passes import FLAG_PASSES
from moe_optimizer.vllm_plugin.proof import PassProof, Proof

NO_WORKER = "no worker process reported: the plugin was not loaded (is VLLM_PLUGINS set?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the launcher itself saw of a pass that several servers carry out together."""

    ran: str
    """"yes" and what was seen, or "no"."""
    why_not: str = ""
    """Why it did not work; "" when it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pass of the plan in the table."""

    pass_name: str
    requested: str
    """What the plan says: the decision's value, or its status where it is not on."""
    applied: str
    """"yes", "no", "by flags", "2 of 4 workers" or "-"."""
    ran: str
    """As `applied`, with the number of layers; "-" for what vLLM carries out itself and does not prove."""
    why_not: str

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row as text, in the order of the headings."""
        return self.pass_name, self.requested, self.applied, self.ran, self.why_not


_NARROWEST = 10
"""Chosen: columns of words stay readable down to here."""
HEADINGS = ("pass", "requested", "applied", "ran", "why not")


NOTHING_OBSERVED: Mapping[str, Observed] = MappingProxyType({})


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
        observed: pass name -> what the launcher saw of it.
    """
    return tuple(_row(plan, decision, proofs, absent, observed) for decision in plan.decisions)


def joined_rows(tables: Mapping[str, Sequence[Row]]) -> tuple[Row, ...]:
    """Return the rows of several servers as one table; where they differ, a cell says what holds on which.

    Args:
        tables: server -> its rows; the same passes in the same order.
    """
    return tuple(_joined(dict(zip(tables, rows, strict=True))) for rows in zip(*tables.values(), strict=True))


def _joined(rows: Mapping[str, Row]) -> Row:
    def cell(values: Mapping[str, str]) -> str:
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return "; ".join(f"{server}: {value}" for server, value in values.items() if value)

    first = next(iter(rows.values()))
    return Row(
        pass_name=first.pass_name,
        requested=first.requested,
        applied=cell({server: row.applied for server, row in rows.items()}),
        ran=cell({server: row.ran for server, row in rows.items()}),
        why_not=cell({server: row.why_not for server, row in rows.items()}),
    )


def model_holders(proofs: Iterable[Proof]) -> tuple[Proof, ...]:
    """Return the proofs of the processes that hold a part of the model, by rank."""
    return tuple(sorted((proof for proof in proofs if proof.world_size), key=lambda proof: proof.model_rank))


def all_holders_reported(proofs: Iterable[Proof]) -> bool:
    """Whether every process that holds a part of the model has written a proof."""
    holders = model_holders(proofs)
    return bool(holders) and {proof.model_rank for proof in holders} == set(range(holders[0].world_size))


def not_running(
    plan: Plan,
    proofs: Sequence[Proof],
    names: Iterable[str],
    *,
    absent: str = NO_WORKER,
    observed: Mapping[str, Observed] = NOTHING_OBSERVED,
) -> dict[str, str]:
    """Return those of the passes `names` that did not run in every process that holds the model, with the reason.

    A pass that flags carry out must be shown by every worker too, as far as workers look at its flags; one that files
    carry out counts as running when the plan has it on and nobody saw otherwise.
    """
    missing = {}
    for name in names:
        decision = plan.decision(name)
        if decision.status is not Status.ON:
            missing[name] = f"the plan has it {decision.status.value}: {decision.reason}"
        elif _shown_by_workers(decision):
            reason = _why_not_running(plan, name, proofs, absent)
            if reason:
                missing[name] = reason
        elif name in observed and observed[name].why_not:
            missing[name] = observed[name].why_not
    return missing


def _shown_by_workers(decision: Decision) -> bool:
    if decision.applier is Applier.FLAGS:
        return decision.pass_name in FLAG_PASSES
    return decision.applier is Applier.PLUGIN


def _why_not_running(plan: Plan, name: str, proofs: Sequence[Proof], absent: str) -> str:
    # What ran under another plan proves nothing about this one.
    for proof in proofs:
        if proof.plan_digest != plan.digest:
            return f"{proof.role} {proof.rank} followed plan {proof.plan_digest or 'none'}, expected {plan.digest}"
    holders = model_holders(proofs)
    entries = [proof.passes.get(name) for proof in holders]
    if holders and all_holders_reported(proofs) and all(entry and entry.ran and not entry.why_not for entry in entries):
        return ""
    # Processes without a part of the model can know why too, for example that this vLLM is too old.
    everyone = [proof.passes.get(name) for proof in proofs]
    reasons = dict.fromkeys(entry.why_not for entry in everyone if entry and entry.why_not)
    if reasons:
        return "; ".join(reasons)
    if not proofs:
        return absent
    decision = plan.decision(name)
    by_flags = decision.applier is Applier.FLAGS
    if not holders and not by_flags:
        return "vLLM did not ask for a kernel of this kind for any layer of this model"
    reported = len({proof.model_rank for proof in holders})
    if holders and reported < holders[0].world_size:
        return f"{reported} of {holders[0].world_size} workers reported"
    if by_flags:
        return "no worker shows what became of its flags"
    left = _layers_left(decision, proofs)
    if left and not any(entry and entry.layers for entry in entries):
        return f"no layer is converted: {left}"
    return "no forward pass reached the kernel yet"


def _row(plan: Plan, decision: Decision, proofs: Sequence[Proof], absent: str, observed: Mapping[str, Observed]) -> Row:
    requested = decision.value if decision.status is Status.ON else decision.status.value
    if decision.status is not Status.ON:
        return Row(pass_name=decision.pass_name, requested=requested, applied="-", ran="-", why_not=decision.reason)
    by_us = decision.applier is Applier.PLUGIN
    applied = "yes" if decision.applier is Applier.NONE else f"by {decision.applier.value}"
    if not _shown_by_workers(decision) or not (proofs or by_us):
        seen = observed.get(decision.pass_name, Observed(ran="-"))
        return Row(
            pass_name=decision.pass_name, requested=requested, applied=applied, ran=seen.ran, why_not=seen.why_not
        )
    entries = [proof.passes.get(decision.pass_name) for proof in model_holders(proofs)]
    ran = _share([bool(entry and entry.ran) for entry in entries])
    layers = max((len(entry.layers) for entry in entries if entry), default=0)
    return Row(
        pass_name=decision.pass_name,
        requested=requested,
        applied=_share([bool(entry and entry.applied) for entry in entries]) if by_us else applied,
        ran=f"{ran}, {layers} layers" if layers and ran != "no" else ran,
        why_not=_why_not_running(plan, decision.pass_name, proofs, absent) or _layers_left(decision, proofs),
    )


def _layers_left(decision: Decision, proofs: Iterable[Proof]) -> str:
    """Return which layers a pass that converts weights left as they are loaded, and why; "" when it left none."""
    if FORMAT_PARAM not in decision.params:
        return ""
    entries = (entry for proof in model_holders(proofs) for entry in proof.passes.values())
    left = {layer.name: layer.why_plain for entry in entries for layer in entry.layers if layer.why_plain}
    if not left:
        return ""
    name, why = min(left.items())
    more = f"; {len(left) - 1} more too" if len(left) > 1 else ""
    return f"{name} stays as loaded: {why}{more}"


def _share(answers: Sequence[bool]) -> str:
    if not answers or not any(answers):
        return "no"
    if all(answers):
        return "yes" if len(answers) == 1 else f"yes, {len(answers)} workers"
    return f"{sum(answers)} of {len(answers)} workers"


def kernels_in_use(proofs: Iterable[Proof]) -> tuple[str, ...]:
    """Return each kernel that ran with its instruction set and dtypes: "fused_experts (cpu), avx512, float32"."""
    lines = {}
    for proof in model_holders(proofs):
        for entry in proof.passes.values():
            if entry.ran and entry.kernel:
                lines[_kernel_line(entry)] = None
    return tuple(lines)


def _kernel_line(entry: PassProof) -> str:
    dtypes = sorted({layer.dtype for layer in entry.layers})
    return ", ".join(part for part in (entry.kernel, entry.isa, *dtypes) if part)


def render_table(rows: Sequence[Row], *, width: int = 80) -> str:
    """Return the table as text of at most `width` columns. Passes that are off are named in one line below it:
    nothing was requested of them, and the plan has their reasons.
    """
    shown = [row for row in rows if row.requested != Status.OFF.value]
    cells = [tuple(printable(cell) for cell in row.cells) for row in shown]
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
    off = [row.pass_name for row in rows if row.requested == Status.OFF.value]
    if off:
        lines += ["", *textwrap.wrap(f"off: {', '.join(off)}", width, subsequent_indent="     ")]
    return "\n".join(lines)


def _wrapped(cells: Sequence[str], sizes: Sequence[int]) -> list[str]:
    columns = [textwrap.wrap(cell, size) or [""] for cell, size in zip(cells, sizes, strict=True)]
    height = max(len(column) for column in columns)
    padded = [column + [""] * (height - len(column)) for column in columns]
    return [
        "  ".join(part.ljust(size) for part, size in zip(parts, sizes, strict=True)).rstrip()
        for parts in zip(*padded, strict=True)
    ]
