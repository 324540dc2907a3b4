"""Puts the ledger of a plan's decode steps beside that of stock vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_optimizer.costs.weights import stored_linear_bits
from moe_optimizer.measure.decode_step.ledger import Ledger, LedgerRow, ledger_of
from moe_optimizer.measure.decode_step.profiled_steps import ProfiledSteps, StepProfile
from moe_optimizer.measure.decode_step.profiling import Side, profile_steps
from moe_optimizer.measure.process import OnStep
from moe_optimizer.plan.pass_params import FourBitParams, Fp8Params, KvCacheParams
from moe_optimizer.plan.plan import Plan

SIDES: tuple[Side, ...] = ("stock", "ours")
_NAMES: dict[Side, str] = {"stock": "stock vLLM", "ours": "the plan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSteps:
    """The decode steps of one side: a ledger and the profile behind it for each batch."""

    ledgers: tuple[Ledger, ...]
    profiles: tuple[StepProfile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """What `moe-optimizer measure step --json` prints."""

    plan_digest: str
    device: str
    vllm: str
    torch: str
    stock: SideSteps
    ours: SideSteps
    remarks: tuple[str, ...]
    """Which batches have shorter sequences than asked for, or are left out on both sides, and why."""


def compare_steps(
    plan: Plan, *, batches: tuple[int, ...], context: int, steps: int, timeout_s: float, on_step: OnStep
) -> StepComparison:
    """Profile decode steps of stock vLLM and of the plan, one after the other.

    Both decode the same batches over the same contexts. Where one of stock vLLM's does not fit, its sequences are
    shorter; a batch that does not fit so either, or not on the plan's side, is left out with a remark.

    Args:
        plan: for one GPU.
        batches: sequences decoded together.
        context: tokens of each sequence, at most.
        steps: counted steps of each batch.
        timeout_s: for each side.
        on_step: called before each side and after each batch.

    Raises:
        UnsupportedError, RequiredNotAppliedError, ServerFailedError: see `profile_steps`.
    """
    contexts = (context,) * len(batches)
    found = dict(
        profiled_sides(
            plan, SIDES, batches=batches, contexts=contexts, steps=steps, timeout_s=timeout_s, on_step=on_step
        )
    )
    ours = found["ours"]
    batches = tuple(profile.batch for profile in ours.profiles)
    return StepComparison(
        plan_digest=plan.digest, device=ours.device, vllm=ours.vllm, torch=ours.torch,
        stock=side_steps(plan, "stock", found["stock"], batches), ours=side_steps(plan, "ours", ours, batches),
        remarks=tuple(remark for side in SIDES for remark in remarks_of(side, found[side])),
    )  # fmt: skip


def profiled_sides(
    plan: Plan,
    sides: Sequence[Side],
    *,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    steps: int,
    timeout_s: float,
    on_step: OnStep,
) -> Iterator[tuple[Side, ProfiledSteps]]:
    """Yield each side's profile once it is there; a later side decodes what the one before it could.

    Args and errors: those of `compare_steps`, but for the tokens of a sequence, which each batch has of its own.
    """
    shorter = True
    for number, side in enumerate(sides):
        name = _NAMES[side]
        on_step(number / len(sides), f"decode steps of {name}")
        found = profile_steps(
            plan, side, batches=batches, contexts=contexts, shorter=shorter, steps=steps, timeout_s=timeout_s,
            on_step=lambda share, text, number=number, name=name: on_step(
                (number + share) / len(sides), f"{name}: {text}"
            ),
        )  # fmt: skip
        batches = tuple(profile.batch for profile in found.profiles)
        contexts, shorter = tuple(profile.context for profile in found.profiles), False
        yield side, found


def side_steps(plan: Plan, side: Side, found: ProfiledSteps, batches: tuple[int, ...] | None = None) -> SideSteps:
    """Return the ledgers of a side's profile, as far as `batches` goes."""
    profiles = tuple(profile for profile in found.profiles if batches is None or profile.batch in batches)
    return SideSteps(ledgers=tuple(_ledger(plan, side, each) for each in profiles), profiles=profiles)


def remarks_of(side: Side, found: ProfiledSteps) -> tuple[str, ...]:
    """Return the remarks on a side's batches with its name."""
    return tuple(f"{_NAMES[side]}: {remark}" for remark in found.remarks)


def _ledger(plan: Plan, side: Side, profile: StepProfile) -> Ledger:
    """Return the ledger of one side, with the bits that its weights and its cache are stored in."""
    assert plan.hardware.gpu is not None, "profile_steps refuses a plan without a GPU"
    expert_bits, linear_bits = plan.model.weight_bits, stored_linear_bits(plan.model)
    kv_bits = 16
    if side == "ours":
        fp8, four_bit = plan.decision("fp8").params, plan.decision("four_bit").params
        cache = plan.decision("kv_cache").params
        if isinstance(fp8, Fp8Params):
            expert_bits = fp8.stored_expert_bits or expert_bits
            linear_bits = fp8.stored_linear_bits or linear_bits
        if isinstance(four_bit, FourBitParams):
            expert_bits = four_bit.stored_expert_bits
        kv_bits = cache.kv_bits if isinstance(cache, KvCacheParams) else kv_bits
    return ledger_of(
        profile, plan.model, plan.hardware.gpu, expert_bits=expert_bits, linear_bits=linear_bits, kv_bits=kv_bits
    )


def render(found: StepComparison) -> str:
    """Return a table for each batch: a line per group of kernels."""
    pairs = zip(found.stock.ledgers, found.ours.ledgers, strict=True)
    return "\n\n".join([*(_table(stock, ours) for stock, ours in pairs), *found.remarks])


def _table(stock: Ledger, ours: Ledger) -> str:
    lines = [
        f"batch {stock.batch}, context {stock.context}: step {stock.step_us:.0f} us stock vLLM, {ours.step_us:.0f} us "
        f"ours; kernels {stock.kernels_us:.0f} and {ours.kernels_us:.0f} us",
        f"{'group':14} {'stock us':>9} {'calls':>7} {'ours us':>9} {'calls':>7} {'least us':>9}",
    ]
    of_stock, of_ours = ({row.group: row for row in ledger.rows} for ledger in (stock, ours))
    for group in dict.fromkeys((*of_stock, *of_ours)):
        row = of_ours.get(group) or of_stock[group]
        least = "" if row.least_us is None else f"{row.least_us:.0f}"
        lines.append(f"{group:14} {_cells(of_stock.get(group))} {_cells(of_ours.get(group))} {least:>9}")
    return "\n".join(lines)


def _cells(row: LedgerRow | None) -> str:
    return f"{'':9} {'':7}" if row is None else f"{row.us:9.1f} {row.calls:7.1f}"
