"""`moe-optimizer doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_optimizer.cli import messages
from moe_optimizer.cli.check import Check
from moe_optimizer.cli.options import DoctorOptions, takes
from moe_optimizer.errors import ExitCode, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `doctor --json` prints."""

    ok: bool
    """Whether nothing that serving here needs is missing."""
    checks: tuple[Check, ...]


@takes(DoctorOptions)
def command(options: DoctorOptions) -> int:
    """Check what serving needs: this machine, vLLM, a model.

    Exit code 3 when something needed to serve here is missing.
    """
    from moe_optimizer.cli.machine_checks import machine_checks
    from moe_optimizer.cli.software_checks import software_checks
    from moe_optimizer.inspection import probe_hardware

    with messages.held_messages(verbose=options.verbose):
        checks = [*machine_checks(probe_hardware()), *software_checks()]
        if options.model is not None:
            from moe_optimizer.cli.model_checks import model_checks

            checks += model_checks(options.model)
        if options.drift:
            from moe_optimizer.cli.seam_checks import seam_checks

            checks += seam_checks()
    report = Report(ok=all(check.status != "missing" for check in checks), checks=tuple(checks))
    messages.write_data(_to_json(report) if options.json else render_checks(checks))
    return ExitCode.OK if report.ok else ExitCode.UNSUPPORTED


def render_checks(checks: Sequence[Check]) -> str:
    """Return one line for each check, with a `hint:` line where one applies."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {printable(check.detail)}")
        if check.hint:
            lines.append(f"{'':<7}  {'':<{width}}  hint: {printable(check.hint)}")
    return "\n".join(lines)


def _to_json(report: Report) -> str:
    import json

    from moe_optimizer.plan.json_codec import encode

    return json.dumps(encode(report), indent=2)
