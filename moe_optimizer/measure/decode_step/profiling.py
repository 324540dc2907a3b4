"""Starts the profiling of a plan's decode steps, and of stock vLLM's with the same arguments from the user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

from moe_optimizer.errors import RequiredNotAppliedError, ServerFailedError, UnsupportedError
from moe_optimizer.launcher.command import check_plugin_visible
from moe_optimizer.measure.decode_step.profiled_steps import ProfiledSteps, StepsRequest
from moe_optimizer.measure.process import MeasurementError, OnStep, run_measurement
from moe_optimizer.plan.json_codec import decode
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import not_running

_MODULE = "moe_optimizer.measure.decode_step.profiled_steps"
_GRACE_S = 10.0
_IN_EVERY_STEP = ("flash_dmoe", "fp8", "four_bit", "sparsity_24")

Side = Literal["ours", "stock"]


def profile_steps(
    plan: Plan,
    side: Side,
    *,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    shorter: bool,
    steps: int,
    timeout_s: float,
    on_step: OnStep,
) -> ProfiledSteps:
    """Profile decode steps in a process of its own.

    Args:
        plan: for one GPU.
        side: "ours" follows the plan; "stock" is vLLM without the plugin, with the arguments that the user gave.
        batches: sequences decoded together, one profile each.
        contexts: of each batch, the tokens of a sequence.
        shorter: a batch that does not fit so has shorter sequences; otherwise it is left out.
        steps: counted steps.
        timeout_s: for the whole process.
        on_step: called after each batch.

    Raises:
        UnsupportedError: the plan is not for one GPU: only there one process holds the whole model; or vLLM would not
            find the plugin; or no batch fits.
        RequiredNotAppliedError: what the plan has on did not run, so that the profile is not the plan's.
        ServerFailedError: the process ended without a result, or took too long.
    """
    if plan.num_gpus != 1 or plan.group is not None:
        raise UnsupportedError(f"the ledger of a decode step needs a plan for one GPU, got one for {plan.num_gpus}")
    request = StepsRequest(
        model=plan.model.path,
        serve_args=(plan.serve_args if side == "ours" else plan.plain_args).words,
        batches=batches,
        contexts=contexts,
        shorter=shorter,
        steps=steps,
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MOE_OPTIMIZER_")}
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-step-") as name:
        folder = Path(name)
        if side == "ours":
            check_plugin_visible(plan)
            (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
            environment |= {**plan.serve_env, "MOE_OPTIMIZER_PLAN": str(folder / "plan.json")}
        try:
            found = run_measurement(
                _MODULE,
                request,
                on_step=on_step,
                log=folder / "log.txt",
                environment=environment,
                timeout_s=timeout_s,
                grace_s=_GRACE_S,
            )
        except MeasurementError as error:
            raise ServerFailedError(f"decode steps are not profiled: {error}") from None
        steps_found = decode(ProfiledSteps, found, origin="profiled steps")
        if not steps_found.profiles:
            raise UnsupportedError(
                "; ".join(steps_found.remarks), hint="ask for smaller --batches, or for a shorter --context"
            )
        missing = not_running(plan, read_proofs(folder), _kernel_passes(plan)) if side == "ours" else {}
    if missing:
        name, why = next(iter(missing.items()))
        raise RequiredNotAppliedError(f"{name}: the plan has it on, but it did not run in the profiled steps: {why}")
    return steps_found


def _kernel_passes(plan: Plan) -> tuple[str, ...]:
    """Return the passes of the plugin that change what a decode step computes."""
    return tuple(each.pass_name for each in plan.plugin_decisions if each.pass_name in _IN_EVERY_STEP)
