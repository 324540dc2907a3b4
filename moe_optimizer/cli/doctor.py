"""`moe-optimizer doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_optimizer.cli import messages
from moe_optimizer.cli.check import Check
from moe_optimizer.cli.options import DoctorOptions, takes
from moe_optimizer.errors import ExitCode, printable


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
    messages.write_data(_to_json(checks) if options.json else render_checks(checks))
    return ExitCode.UNSUPPORTED if any(check.status == "missing" for check in checks) else ExitCode.OK


def render_checks(checks: Sequence[Check]) -> str:
    """Return one line for each check, with a `hint:` line where one applies."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {printable(check.detail)}")
        if check.hint:
            lines.append(f"{'':<7}  {'':<{width}}  hint: {printable(check.hint)}")
    return "\n".join(lines)


def _to_json(checks: Sequence[Check]) -> str:
    import json

    from moe_optimizer.plan.json_codec import encode

    data: dict[str, Any] = {"ok": all(c.status != "missing" for c in checks), "checks": encode(list(checks))}
    return json.dumps(data, indent=2)
