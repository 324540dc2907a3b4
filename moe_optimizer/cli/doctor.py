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


@takes(DoctorOptions)
def command(options: DoctorOptions) -> messages.Output:
    """Check what serving needs: this machine, vLLM, and the files of a MODEL if one is named.

    Exit code 3 when something needed to serve here is missing, or with --drift when a seam has changed or gone.
    """
    report = _examine(options)
    return messages.Output(result=report, render=_render, code=ExitCode.OK if report.ok else ExitCode.UNSUPPORTED)


def _examine(options: DoctorOptions) -> Report:
    from moe_optimizer.cli.check import Report
    from moe_optimizer.cli.engine_checks import engine_checks
    from moe_optimizer.cli.machine_checks import machine_checks
    from moe_optimizer.cli.model_checks import model_checks
    from moe_optimizer.cli.package_checks import package_checks
    from moe_optimizer.cli.software_checks import software_checks
    from moe_optimizer.cli.speed_checks import kernel_speeds_check
    from moe_optimizer.inspection.hardware_probe import probe_hardware
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
    width = messages.output_width()
    text = render_checks(report.checks, width=width)
    if report.seams is None:
        return text
    rows = [
        (seam.status.value, seam.name, seam.detail, "" if seam.status.value == "present" else f"needed for: {seam.why}")
        for seam in report.seams
    ]
    return f"{text}\n\nplaces in vLLM that this package builds on\n{_listed(rows, width)}"


def render_checks(checks: Sequence[Check], *, width: int) -> str:
    """Return each check with its status, and a `hint:` line where one applies."""
    rows = [(check.status, check.name, check.detail, check.hint and f"hint: {check.hint}") for check in checks]
    return _listed(rows, width)


def _listed(found: Sequence[tuple[str, str, str, str | None]], width: int) -> str:
    """Return status, name and detail in columns, and below what follows from it."""
    names = max(len(name) for _, name, _, _ in found)
    rows: list[tuple[str, str]] = []
    for status, name, detail, below in found:
        rows.append((f"{status:<7}  {name:<{names}}", detail))
        if below:
            rows.append(("", below))
    return messages.two_columns(rows, width=width)
