"""Runs `moe-optimizer measure`: what a plan or a profile needs to know of this machine or of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.option_values import check_choice, whole_numbers
from moe_optimizer.cli.options import (
    GRANULARITIES,
    MeasureSpeedsOptions,
    MeasureStepOptions,
    MeasureTextOptions,
    SensitivityOptions,
)
from moe_optimizer.cli.progress import ProgressBar, ProgressLines
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import ExitCode, InputError

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan

_DEFAULT_BUDGET_S = 60.0
_DEFAULT_MAX_TOKENS = 4096
_SPEEDS_PASS = "flash_dmoe"
_GRACE_S = 10.0
_MOST_SEQUENCES = 65_536
_STEP_TIMEOUT_S = 600.0


@takes(MeasureSpeedsOptions)
def speeds(options: MeasureSpeedsOptions) -> int:
    """Measure the expert kernels of a model on this machine, ours and vLLM's.

    Measures what no table of kernel speeds answers, and keeps it in the user's cache, where plans find it. `serve` does
    the same before a first start, in less time.
    """
    from moe_optimizer.cli import planning, speed_questions
    from moe_optimizer.cli.preflight import check_can_serve_here
    from moe_optimizer.cli.settings import Settings
    from moe_optimizer.cli.show_config import shows_config

    lines = ProgressLines(verbose=options.verbose)
    measured = False

    def measure(plan: Plan, settings: Settings) -> bool:
        nonlocal measured
        check_can_serve_here(plan, settings)
        request = speed_questions.speed_request(plan, options.budget or _DEFAULT_BUDGET_S)
        if request is not None:
            speed_questions.measure(request, lines=lines)
            measured = True
        return measured

    with messages.held_messages(verbose=options.verbose):
        if shows_config(options):
            return ExitCode.OK
        decision = planning.make(options, measure=measure).plan.decision(_SPEEDS_PASS)
    found = {"measured": measured, "kernels": decision.value, "reason": decision.reason}
    messages.write_result(found, as_json=options.json, render=_rendered_speeds)
    return ExitCode.OK


def _rendered_speeds(found: Mapping[str, Any]) -> str:
    first = "measured" if found["measured"] else "nothing was measured: tables answer what a plan asks"
    rows = (("speeds", first), ("kernels", found["kernels"]), ("reason", found["reason"]))
    return messages.two_columns(rows, width=messages.output_width())


@takes(MeasureStepOptions)
def step(options: MeasureStepOptions) -> int:
    """Measure where the time of a decode step goes, by the plan and by stock vLLM.

    Shows time and calls of each group of kernels beside the least time that the group's bytes take. On one GPU;
    arguments after -- go to vllm serve, on both sides.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.preflight import check_can_serve_here
    from moe_optimizer.cli.show_config import shows_config
    from moe_optimizer.measure.decode_step.comparison import compare_steps, render

    lines = ProgressLines(verbose=options.verbose)
    batches = whole_numbers("--batches", options.batches, _MOST_SEQUENCES)
    with messages.held_messages(verbose=options.verbose, then=lines.warn):
        if shows_config(options):
            return ExitCode.OK
        planned = planning.make(options)
        check_can_serve_here(planned.plan, planned.settings)
    with clean_termination(), ProgressBar("decode step", lines=lines) as bar:
        found = compare_steps(
            planned.plan,
            batches=batches,
            context=options.context_tokens,
            steps=options.steps,
            timeout_s=options.timeout or _STEP_TIMEOUT_S,
            on_step=bar.show,
        )
    messages.write_result(found, as_json=options.json, render=render)
    return ExitCode.OK


@takes(SensitivityOptions)
def fp8_sensitivity(options: SensitivityOptions) -> int:
    """Measure how much FP8 changes each layer's experts on a text.

    `fp8.sensitivity` of a profile names the file that it writes; the plan then keeps the layers that change more than
    the profile allows. Runs the model with our kernel, on vLLM's CPU build.
    """
    check_choice("--granularity", options.granularity, GRANULARITIES)
    found = _on_text("fp8_sensitivity", options, {"granularity": options.granularity})

    def render(found: Mapping[str, Any]) -> str:
        lines = [f"layer {layer:>3}  {error:.4f}" for layer, error in found["errors"].items()]
        return "\n".join([*lines, f"{found['tokens']} tokens; written to {options.output}"])

    messages.write_result(found, as_json=options.json, render=render)
    return ExitCode.OK


@takes(MeasureTextOptions)
def activation_norms(options: MeasureTextOptions) -> int:
    """Measure what each layer's experts read on a text, to prune them by it.

    `sparsity_24.activation_norms` of a profile names the file that it writes. Runs the model with our kernel, on vLLM's
    CPU build.
    """
    found = {"tokens": _on_text("activation_norms", options, {}), "file": options.output}
    messages.write_result(
        found, as_json=options.json, render=lambda found: f"{found['tokens']} tokens; written to {found['file']}"
    )
    return ExitCode.OK


def _on_text(module: str, options: MeasureTextOptions, settings: Mapping[str, str]) -> Any:
    """Run a measurement on a text in a process of its own; return its result.

    Raises:
        MoeOptimizerError: an option is wrong, the model cannot be measured, or the process died.
    """
    from moe_optimizer.measure.observed_text import TextRequest, check_request
    from moe_optimizer.measure.process import run_measurement
    from moe_optimizer.plan.json_codec import encode

    for flag, value in (("--text", options.text), ("--output", options.output)):
        if not value:
            raise InputError(f"{flag}: is missing", hint=f"name a file: {flag} FILE")
    with messages.held_messages(verbose=options.verbose):
        request = TextRequest(
            model=options.model_name,
            name="",
            trust_remote_code=options.trust_remote_code,
            text=options.text or "",
            max_tokens=options.max_tokens or _DEFAULT_MAX_TOKENS,
            output=options.output or "",
        )
        request = check_request(request)
    lines = ProgressLines(verbose=options.verbose)
    with (
        tempfile.TemporaryDirectory(prefix="moe-optimizer-text-") as folder,
        clean_termination(),
        ProgressBar(module.replace("_", " "), lines=lines) as bar,
    ):
        return run_measurement(
            f"moe_optimizer.measure.{module}",
            encode(request) | settings,
            on_step=bar.show,
            log=Path(folder) / "log.txt",
            grace_s=_GRACE_S,
        )


app = typer.Typer(
    help="Measure kernels on this machine, or a model on a text, for plans and profiles to use.", rich_markup_mode=None
)
app.command("speeds")(speeds)
app.command("step")(step)
app.command("fp8-sensitivity")(fp8_sensitivity)
app.command("activation-norms")(activation_norms)
