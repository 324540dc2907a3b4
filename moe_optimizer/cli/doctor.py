"""`moe-optimizer doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_optimizer.cli import messages
from moe_optimizer.cli.check import Check, SeamState
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import DoctorOptions
from moe_optimizer.errors import ExitCode, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `doctor --json` prints."""

    ok: bool
    """Whether nothing that serving here needs is missing, and with --drift no seam has changed or gone."""
    checks: tuple[Check, ...]
    seams: tuple[SeamState, ...] | None
    """None without --drift."""


@takes(DoctorOptions)
def command(options: DoctorOptions) -> int:
    """Check what serving needs: this machine, vLLM, and the files of a MODEL if one is named.

    Exit code 3 when something needed to serve here is missing, or with --drift when a seam has changed or gone.
    """
    with messages.held_messages(verbose=options.verbose):
        report = _examine(options)
    messages.write_data(_to_json(report) if options.json else render_report(report))
    return ExitCode.OK if report.ok else ExitCode.UNSUPPORTED


def _examine(options: DoctorOptions) -> Report:
    from moe_optimizer.cli.machine_checks import machine_checks
    from moe_optimizer.cli.software_checks import seam_states, software_checks
    from moe_optimizer.cli.speed_checks import kernel_speeds_check
    from moe_optimizer.inspection import probe_hardware

    model = options.named_model
    hardware = probe_hardware()
    checks = [*machine_checks(hardware), *software_checks(), kernel_speeds_check(hardware)]
    if model is not None:
        from moe_optimizer.cli.model_checks import model_checks

        checks += model_checks(model)
    seams = seam_states() if options.drift else None
    whole = all(check.status != "missing" for check in checks)
    return Report(ok=whole and all(seam.status == "present" for seam in seams or ()), checks=tuple(checks), seams=seams)


def render_report(report: Report) -> str:
    """Return the report as text: one line for each check and each seam."""
    text = render_checks(report.checks)
    return text if report.seams is None else f"{text}\n\n{render_seams(report.seams)}"


def render_checks(checks: Sequence[Check]) -> str:
    """Return one line for each check, with a `hint:` line where one applies."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {printable(check.detail)}")
        if check.hint:
            lines.append(f"{'':<7}  {'':<{width}}  hint: {printable(check.hint)}")
    return "\n".join(lines)


def render_seams(seams: Sequence[SeamState]) -> str:
    """Return one line for each seam, and for one that has changed or gone what it was needed for."""
    width = max(len(seam.name) for seam in seams)
    lines = ["places in vLLM that this package builds on"]
    for seam in seams:
        lines.append(f"{seam.status:<7}  {seam.name:<{width}}  {printable(seam.detail)}")
        if seam.status != "present":
            lines.append(f"{'':<7}  {'':<{width}}  needed for: {seam.why}")
    return "\n".join(lines)


def _to_json(report: Report) -> str:
    import json

    from moe_optimizer.plan.json_codec import encode

    return json.dumps(encode(report), indent=2)
