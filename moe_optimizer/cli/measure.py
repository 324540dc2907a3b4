"""Runs `moe-optimizer measure`: what a plan or a profile needs to know of this machine or of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.measuring_options import (
    FourBitSensitivityOptions,
    MeasureLinksOptions,
    MeasureSpeedsOptions,
    MeasureStepOptions,
    MeasureTextOptions,
    SensitivityOptions,
)
from moe_optimizer.cli.option_values import whole_numbers
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.specs.expert_formats import INT4_GROUPS, MXFP4, MXFP4_GROUP, int4_weights
from moe_optimizer.specs.quantity import bytes_in_words

if TYPE_CHECKING:
    from moe_optimizer.measure.links.measurement import LinkRequest
    from moe_optimizer.specs.links import LinkTimes

_DEFAULT_BUDGET_S = 60.0
_DEFAULT_MAX_TOKENS = 4096
_SPEEDS_PASS = "flash_dmoe"
_GRACE_S = 10.0
_MOST_SEQUENCES = 65_536
_STEP_TIMEOUT_S = 600.0
_PROCESSES = 2
"""The fewest that exchange anything."""


@takes(MeasureSpeedsOptions)
def speeds(options: MeasureSpeedsOptions) -> messages.Output:
    """Measure the expert kernels of a model on this machine, ours and vLLM's.

    Measures what no table of kernel speeds answers, and keeps it in the user's cache, where plans find it. `serve` does
    the same before a first start, in less time.
    """
    from moe_optimizer.cli import planning, speed_questions
    from moe_optimizer.cli.preflight import check_can_serve_here

    settings, request = planning.read_request(options)
    questions = None
    if not settings.disabled:
        plan = planning.decide_before_measuring(request)
        check_can_serve_here(plan, settings)
        questions = speed_questions.speed_request(plan, options.budget or _DEFAULT_BUDGET_S)
    if questions is not None:
        speed_questions.measure(questions, lines=ProgressLines(verbose=options.verbose))
    decision = planning.decide(settings, planning.after_measuring(request)).decision(_SPEEDS_PASS)
    found = {"measured": questions is not None, "kernels": decision.value, "reason": decision.reason}
    return messages.Output(result=found, render=_rendered_speeds)


def _rendered_speeds(found: Mapping[str, Any]) -> str:
    first = "measured" if found["measured"] else "nothing was measured: tables answer what a plan asks"
    rows = (("speeds", first), ("kernels", found["kernels"]), ("reason", found["reason"]))
    return messages.two_columns(rows, width=messages.output_width())


@takes(MeasureLinksOptions)
def links(options: MeasureLinksOptions) -> messages.Output:
    """Measure what GPUs of this machine take to exchange tensors.

    Times the all-reduces, all-gathers and reduce-scatters of 2, 4, 8 and all GPUs by size, and keeps them in the user's
    cache, where plans find them. Without a GPU it times two processes, which no plan uses.
    """
    from moe_optimizer.measure.links.tables import measure_links

    request = _link_request(options.gpus)
    with progress_bar("links", lines=ProgressLines(verbose=options.verbose)) as show:
        tables = measure_links(request, on_step=show)
    return messages.Output(result=tables, render=_rendered_links)


def _link_request(asked: int | None) -> LinkRequest:
    """Return what to measure on this machine.

    Raises:
        UnsupportedError: it has no two GPUs, or not as many as asked for.
    """
    from moe_optimizer.inspection.hardware_probe import probe_hardware
    from moe_optimizer.measure.links.measurement import MOST_BYTES, LinkRequest

    hardware = probe_hardware()
    if hardware.gpu is None:
        name = "" if hardware.cpu is None else hardware.cpu.name
        device, there = "cpu", _PROCESSES
    else:
        name = hardware.gpu.name
        device, there = "cuda", hardware.num_gpus
    most = there if asked is None else asked
    if not _PROCESSES <= most <= there:
        what = "processes, without a GPU" if device == "cpu" else "GPUs"
        raise UnsupportedError(
            f"measure links: got {most} {what}, expected at least {_PROCESSES}, and at most the {there} that are here",
            hint="one GPU exchanges nothing: plans need no links of it"
            if there < _PROCESSES
            else f"without --gpus all {there} are timed",
        )
    groups = sorted({2**exponent for exponent in range(1, most.bit_length())} | {most})
    return LinkRequest(device=device, name=name, groups=tuple(groups), most_bytes=MOST_BYTES[device])


def _rendered_links(tables: tuple[LinkTimes, ...]) -> str:
    lines: list[str] = []
    for table in tables:
        lines += [f"{table.num_devices} x {table.device}", f"{'size':>10}{'all-reduce us':>16}{'gather us':>12}"]
        lines += [
            f"{bytes_in_words(size):>10}{us:>16.1f}{table.gather_us[size]:>12.1f}"
            for size, us in table.all_reduce_us.items()
        ]
    return "\n".join(lines)


@takes(MeasureStepOptions)
def step(options: MeasureStepOptions) -> messages.Output:
    """Measure where the time of a decode step goes, by the plan and by stock vLLM.

    Shows time and calls of each group of kernels beside the least time that the group's bytes take. On one GPU;
    arguments after -- go to vllm serve, on both sides.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.preflight import check_can_serve_here
    from moe_optimizer.measure.decode_step.comparison import compare_steps, render

    batches = whole_numbers("--batches", options.batches, _MOST_SEQUENCES)
    settings, request = planning.read_request(options)
    plan = planning.decide(settings, planning.after_measuring(request))
    check_can_serve_here(plan, settings)
    with progress_bar("decode step", lines=ProgressLines(verbose=options.verbose)) as show:
        found = compare_steps(
            plan,
            batches=batches,
            context=options.context_tokens,
            steps=options.steps,
            timeout_s=options.timeout or _STEP_TIMEOUT_S,
            on_step=show,
        )
    return messages.Output(result=found, render=render)


@takes(SensitivityOptions)
def fp8_sensitivity(options: SensitivityOptions) -> messages.Output:
    """Measure how much FP8 changes each layer's experts on a text.

    `fp8.sensitivity` of a profile names the file that it writes; the plan then keeps the layers that change more than
    the profile allows. Runs the model with our kernel, on vLLM's CPU build.
    """
    return _sensitivity(options, f"fp8_{options.granularity}")


@takes(FourBitSensitivityOptions)
def four_bit_sensitivity(options: FourBitSensitivityOptions) -> messages.Output:
    """Measure how much four bits change each layer's experts on a text.

    `four_bit.sensitivity` of a profile names the file that it writes; the plan then keeps the layers that change more
    than the profile allows. Runs the model with our kernel, on vLLM's CPU build.
    """
    if options.format == MXFP4:
        if options.group not in (None, str(MXFP4_GROUP)):
            raise InputError(f"--group {options.group}: mxfp4 has a scale per {MXFP4_GROUP} weights")
        return _sensitivity(options, MXFP4)
    return _sensitivity(options, int4_weights(int(options.group or INT4_GROUPS[0]), zero_points=False))


def _sensitivity(options: MeasureTextOptions, weights: str) -> messages.Output:
    def render(found: Mapping[str, Any]) -> str:
        lines = [f"layer {layer:>3}  {error:.4f}" for layer, error in found["errors"].items()]
        return "\n".join([*lines, f"{found['tokens']} tokens; written to {options.output}"])

    return messages.Output(result=_on_text("layer_sensitivity", options, {"weights": weights}), render=render)


@takes(MeasureTextOptions)
def activation_norms(options: MeasureTextOptions) -> messages.Output:
    """Measure what each layer's experts read on a text, to prune them by it.

    `sparsity_24.activation_norms` of a profile names the file that it writes. Runs the model with our kernel, on vLLM's
    CPU build.
    """
    found = {"tokens": _on_text("activation_norms", options, {}), "file": options.output}
    return messages.Output(result=found, render=lambda found: f"{found['tokens']} tokens; written to {found['file']}")


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
    lines = ProgressLines(verbose=options.verbose)
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-text-") as folder:
        request = check_request(
            TextRequest(
                model=options.model_name,
                name="",
                trust_remote_code=options.trust_remote_code,
                text=options.text or "",
                max_tokens=options.max_tokens or _DEFAULT_MAX_TOKENS,
                output=options.output or "",
                run_dir=folder,
            )
        )
        with progress_bar(module.replace("_", " "), lines=lines) as show:
            return run_measurement(
                f"moe_optimizer.measure.{module}",
                encode(request) | settings,
                on_step=show,
                log=Path(folder) / "log.txt",
                grace_s=_GRACE_S,
            )


app = typer.Typer(
    help="Measure kernels on this machine, or a model on a text, for plans and profiles to use.", rich_markup_mode=None
)
app.command("speeds")(speeds)
app.command("links")(links)
app.command("step")(step)
app.command("fp8-sensitivity")(fp8_sensitivity)
app.command("four-bit-sensitivity")(four_bit_sensitivity)
app.command("activation-norms")(activation_norms)
