"""Runs `moe-optimizer doctor`: reports what is here, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import DoctorOptions
from moe_optimizer.errors import ExitCode

if TYPE_CHECKING:
    from moe_optimizer.cli.check import Check, Report
    from moe_optimizer.vllm_plugin.drift import Seam


@takes(DoctorOptions)
def command(options: DoctorOptions) -> int:
    """Check what serving needs: this machine, vLLM, and the files of a MODEL if one is named.

    Exit code 3 when something needed to serve here is missing, or with --drift when a seam has changed or gone.
    """
    with messages.held_messages(verbose=options.verbose):
        report = _examine(options)
    messages.write_result(report, as_json=options.json, render=_render)
    return ExitCode.OK if report.ok else ExitCode.UNSUPPORTED


def _examine(options: DoctorOptions) -> Report:
    from moe_optimizer.cli.check import Report
    from moe_optimizer.cli.engine_checks import engine_checks
    from moe_optimizer.cli.machine_checks import machine_checks
    from moe_optimizer.cli.model_checks import model_checks
    from moe_optimizer.cli.package_checks import package_checks
    from moe_optimizer.cli.software_checks import software_checks
    from moe_optimizer.cli.speed_checks import kernel_speeds_check
    from moe_optimizer.inspection import probe_hardware
    from moe_optimizer.vllm_plugin.drift import SeamStatus, probe_seams

    model = options.named_model
    hardware = probe_hardware()
    checks = (
        *machine_checks(hardware),
        *package_checks(),
        *software_checks(),
        *engine_checks(has_gpu=hardware.gpu is not None),
        kernel_speeds_check(hardware),
        *(model_checks(model) if model is not None else ()),
    )
    seams = probe_seams() if options.drift else None
    whole = all(check.status != "missing" for check in checks)
    known = all(seam.status is SeamStatus.PRESENT for seam in seams or ())
    return Report(ok=whole and known, checks=checks, seams=seams)


def _render(report: Report) -> str:
    text = render_checks(report.checks, width=messages.output_width())
    return text if report.seams is None else f"{text}\n\n{_render_seams(report.seams, width=messages.output_width())}"


def render_checks(checks: Sequence[Check], *, width: int) -> str:
    """Return each check with its status, and a `hint:` line where one applies."""
    names = max(len(check.name) for check in checks)
    rows: list[tuple[str, str]] = []
    for check in checks:
        rows.append((f"{check.status:<7}  {check.name:<{names}}", check.detail))
        if check.hint:
            rows.append(("", f"hint: {check.hint}"))
    return messages.two_columns(rows, width=width)


def _render_seams(seams: Sequence[Seam], *, width: int) -> str:
    """Return each seam with its status, and what it is needed for if it has changed or gone."""
    names = max(len(seam.name) for seam in seams)
    rows: list[tuple[str, str]] = []
    for seam in seams:
        rows.append((f"{seam.status.value:<7}  {seam.name:<{names}}", seam.detail))
        if seam.status.value != "present":
            rows.append(("", f"needed for: {seam.why}"))
    return f"places in vLLM that this package builds on\n{messages.two_columns(rows, width=width)}"
