"""Runs `moe-optimizer debug`: the embedded engine beside transformers, a server, or its own earlier outputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.engine_checks import check_packages
from moe_optimizer.cli.options import CompareOptions, GenerationsOptions, OracleOptions
from moe_optimizer.errors import ExitCode

if TYPE_CHECKING:
    from moe_optimizer.debug.compare import CompareReport
    from moe_optimizer.debug.generations import GenerationsReport
    from moe_optimizer.debug.oracle import OracleReport


@takes(CompareOptions)
def compare(options: CompareOptions) -> messages.Output:
    """Compare the embedded engine with transformers, operation by operation.

    In float32 on the CPU; names the first operation that differs. Exit code 5 if one does.
    """
    check_packages()
    from moe_optimizer.debug.compare import compare

    report = compare(Path(options.model_name).expanduser(), layer=options.layer)
    code = ExitCode.OK if report.first_difference is None else ExitCode.QUALITY_FAILED
    return messages.Output(result=report, render=_rendered_compare, code=code)


@takes(OracleOptions)
def oracle(options: OracleOptions) -> messages.Output:
    """Compare a server's tokens with those of the embedded engine in float32.

    The server must serve the same model. Exit code 5 if a token is beyond the tolerance.
    """
    check_packages()
    from moe_optimizer.debug.oracle import oracle

    folder = Path(options.model_name).expanduser()
    report = oracle(options.url.rstrip("/"), folder, tolerance=options.tolerance)
    code = ExitCode.OK if report.same else ExitCode.QUALITY_FAILED
    return messages.Output(result=report, render=_rendered_oracle, code=code)


@takes(GenerationsOptions)
def generations(options: GenerationsOptions) -> messages.Output:
    """Keep the embedded engine's outputs, or compare them with those kept before.

    Exit code 5 if an output has changed.
    """
    check_packages()
    from moe_optimizer.debug.generations import generations

    report = generations(
        Path(options.model_name).expanduser(),
        save=None if options.save is None else Path(options.save),
        against=None if options.against is None else Path(options.against),
    )
    code = ExitCode.QUALITY_FAILED if report.changed else ExitCode.OK
    return messages.Output(result=report, render=_rendered_generations, code=code)


def _rendered_compare(report: CompareReport) -> str:
    lines = [f"{'same' if step.same else 'DIFFERS':<8}{step.difference:<10.2g}{step.name}" for step in report.steps]
    lines += [f"{'same' if each.same else 'DIFFERS':<18}{each.name}: {each.detail}" for each in report.findings]
    lines += ["", "what each token, a line, attends to in the first head, from . (little) to @ (all):"]
    lines += [*(f"  {line}" for line in report.pattern), ""]
    lines += [
        f"{each.name}: mean {each.mean:.2g}, std {each.std:.2g}, largest {each.largest:.2g}, zero {each.zeros:.0%}"
        for each in report.weights
    ]
    first = report.first_difference
    return "\n".join([*lines, "", f"first difference: {first}" if first else "nothing differs"])


def _rendered_oracle(report: OracleReport) -> str:
    lines = [
        f"{report.tokens} tokens; log-probabilities differ by {report.mean_difference:.2g} in the mean, "
        f"{report.largest_difference:.2g} at most"
    ]
    first = report.first_difference
    if first is not None:
        lines.append(
            f"first beyond {report.tolerance:g}: prompt {first.prompt}, token {first.place} ({first.token_id}): server "
            f"{first.theirs:.3f}, engine {first.ours:.3f}, there number {first.rank}"
        )
    return "\n".join([*lines, *report.layers])


def _rendered_generations(report: GenerationsReport) -> str:
    said = "kept" if report.saved else f"{len(report.changed)} changed"
    return "\n".join([*report.changed, f"{report.outputs} outputs, {said}"])


app = typer.Typer(
    help="Compare the embedded engine with transformers, a server, or its earlier outputs.", rich_markup_mode=None
)
app.command("compare")(compare)
app.command("oracle")(oracle)
app.command("generations")(generations)
