"""Judges by the proofs whether a pass ran in every process that holds the model, and if not, why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import FourBitParams, Fp8Params, Sparsity24Params
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.shown import serves_fp8_checkpoint, shown_by_workers
from moe_optimizer.specs.expert_formats import four_bits
from moe_optimizer.specs.quantity import bytes_in_words

NO_WORKER = "no worker process reported: the plugin was not loaded (is VLLM_PLUGINS set?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the launcher itself observed of a pass that several servers carry out together."""

    ran: str
    """"yes" with a detail, or "no"."""
    why_not: str = ""
    """Why it did not run; "" when it did."""


NOTHING_OBSERVED: Mapping[str, Observed] = MappingProxyType({})


def model_holders(proofs: Iterable[Proof]) -> tuple[Proof, ...]:
    """Return the proofs of the processes that hold a part of the model, by rank."""
    return tuple(sorted((proof for proof in proofs if proof.world_size), key=lambda proof: proof.model_rank))


def all_holders_reported(proofs: Iterable[Proof], *, copies: int = 1) -> bool:
    """Return whether every process that holds a part of the model has written a proof.

    Args:
        proofs: those of one server.
        copies: number of independent engines, each with all ranks.
    """
    holders = model_holders(proofs)
    reported = Counter(proof.model_rank for proof in holders)
    if not holders or reported.keys() != set(range(holders[0].world_size)):
        return False
    return min(reported.values()) >= copies


def _engines(plan: Plan) -> int:
    """Return the number of independent engines: one for each data parallel copy of a model without experts."""
    return 1 if plan.model.is_moe else plan.parallelism.data_parallel_size


def not_running(
    plan: Plan,
    proofs: Sequence[Proof],
    names: Collection[str],
    *,
    absent: str = NO_WORKER,
    observed: Mapping[str, Observed] = NOTHING_OBSERVED,
    unless_no_faster: Collection[str] = (),
) -> dict[str, str]:
    """Return those of the passes `names` that did not run in every process that holds the model, with the reason.

    Those of `unless_no_faster` may stay away where a process timed them no faster than vLLM's own.

    Workers must show a pass of the plugin, one that vLLM's arguments carry out where workers check them, and an FP8
    checkpoint. What the launcher observed otherwise does not run; a pass that files carry out is only observed.
    """
    unknown = set(names) - {decision.pass_name for decision in plan.decisions}
    assert not unknown, f"the plan has no {unknown}"
    missing = {}
    for decision in plan.decisions:
        name = decision.pass_name
        if name not in names:
            continue
        if decision.status is not Status.ON:
            missing[name] = f"the plan has it {decision.status.value}: {decision.reason}"
            continue
        free = name in unless_no_faster
        shown = shown_by_workers(decision)
        reason = why_not_running(plan, decision, proofs, absent, unless_no_faster=free) if shown else ""
        if not reason and name in observed:
            reason = observed[name].why_not
        if reason:
            missing[name] = reason
    return missing


def why_not_running(
    plan: Plan, decision: Decision, proofs: Sequence[Proof], absent: str, *, unless_no_faster: bool = False
) -> str:
    """Return why a pass that workers show did not run in all of them; "" when it did.

    Args:
        plan: what was requested.
        decision: of the pass; one of the plan's.
        proofs: those of one server.
        absent: why there is no proof at all.
        unless_no_faster: whether a worker may leave it that timed it no faster than vLLM's own.
    """
    foreign = next((proof for proof in proofs if proof.plan_digest != plan.digest), None)
    if foreign is not None:
        followed = foreign.plan_digest or "none"
        return f"{foreign.role} {foreign.rank} followed plan {followed}, expected {plan.digest}"
    entries = [proof.passes.get(decision.pass_name) for proof in model_holders(proofs)]
    if all_holders_reported(proofs, copies=_engines(plan)) and all(
        entry and ((entry.ran and not entry.why_not) or (unless_no_faster and entry.timed_no_faster))
        for entry in entries
    ):
        return ""
    # Processes without a part of the model can state a reason too, for example that this vLLM is too old.
    everyone = [proof.passes.get(decision.pass_name) for proof in proofs]
    stated = dict.fromkeys(entry.why_not for entry in everyone if entry and entry.why_not)
    if stated:
        return "; ".join(stated)
    return _what_is_missing(decision, proofs, _engines(plan)) if proofs else absent


def _what_is_missing(decision: Decision, proofs: Sequence[Proof], copies: int) -> str:
    """Return what the proofs of a pass lack, where no process states why it did not run."""
    holders = model_holders(proofs)
    if not holders and decision.applier is Applier.PLUGIN:
        return "vLLM did not ask for a kernel of this kind for any layer of this model"
    if holders and not all_holders_reported(proofs, copies=copies):
        reported = Counter(proof.model_rank for proof in holders).values()
        return f"{sum(min(copies, each) for each in reported)} of {copies * holders[0].world_size} workers reported"
    entries = [proof.passes.get(decision.pass_name) for proof in holders]
    if serves_fp8_checkpoint(decision):
        return "no worker shows how it holds the weights"
    if decision.applier is Applier.FLAGS:
        applied = any(entry and entry.applied for entry in entries)
        return "no request has run with it yet" if applied else "no worker shows what became of its flags"
    left = layers_left(decision, proofs)
    if left and not any(entry and entry.layers for entry in entries):
        return f"no layer is converted: {left}"
    return "no forward pass reached the kernel yet"


def layers_left(decision: Decision, proofs: Iterable[Proof]) -> str:
    """Return which layers a converting pass left as they were loaded, and why; "" when it left none."""
    if decision.weight_format is None:
        return ""
    entries = (entry for proof in model_holders(proofs) for entry in proof.passes.values())
    left = {layer.name: layer.why_plain for entry in entries for layer in entry.layers if layer.why_plain}
    if not left:
        return ""
    name, why = min(left.items())
    more = f"; {len(left) - 1} more too" if len(left) > 1 else ""
    unplanned = max(_unplanned_bytes(decision, proof) for proof in model_holders(proofs))
    memory = f"; {bytes_in_words(unplanned)} more than the memory plan counts" if unplanned else ""
    return f"{name} stays as loaded: {why}{more}{memory}"


def _unplanned_bytes(decision: Decision, proof: Proof) -> int:
    """Return by how many bytes the weights of one worker exceed the plan, because of layers that were not converted."""
    if isinstance(decision.params, Fp8Params):
        kept, planned_bits = decision.params.excluded_layers, 8
    elif isinstance(decision.params, FourBitParams):
        kept, planned_bits = (
            decision.params.excluded_layers,
            four_bits(decision.params.weight_format, decision.params.group),
        )
    else:
        kept, planned_bits = (), decision.params_as(Sparsity24Params).stored_expert_bits
    layers = {layer.name: layer for entry in proof.passes.values() for layer in entry.layers if layer.why_plain}
    unplanned = [layer for layer in layers.values() if layer.decoder_layer not in kept]
    return round(sum(layer.weight_bytes - layer.num_weights * planned_bits / 8 for layer in unplanned))


def kernels_in_use(proofs: Iterable[Proof]) -> tuple[str, ...]:
    """Return each kernel that ran with its instruction set and what it computed with:
    "fused_experts (cpu), avx512, bfloat16, bfloat16 with fp8 weights".
    """
    ran: dict[tuple[str, str], set[str]] = {}
    for proof in model_holders(proofs):
        for entry in proof.passes.values():
            if entry.ran and entry.kernel:
                ran.setdefault((entry.kernel, entry.isa), set()).update(layer.computed_in for layer in entry.layers)
    return tuple(", ".join(filter(None, (*kernel, *sorted(formats)))) for kernel, formats in ran.items())
