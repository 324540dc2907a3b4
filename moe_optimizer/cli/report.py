"""Runs `moe-optimizer report`: one HTML file of what was planned, proven and measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.measuring_options import ReportOptions
from moe_optimizer.errors import InputError
from moe_optimizer.files import write_atomically

_DEFAULT_NAME = "report.html"


@takes(ReportOptions)
def command(options: ReportOptions) -> messages.Output:
    """Make one HTML file of what a run planned, proved and measured.

    SOURCE is the run folder of serve or bench, or a file that bench, quality, measure step, plan or experts wrote with
    --json; several are put together. A section that nothing fills names the command that does.
    """
    sources = [Path(each) for each in options.sources]
    if not sources:
        raise InputError("SOURCE: is missing", hint="give a run folder, or a file that bench --json wrote")
    folder = sources[0] if sources[0].is_dir() else Path()
    path = folder / _DEFAULT_NAME if options.html is None else Path(options.html)
    check_report_path(path)
    line = write_report(sources, path)
    return messages.Output(result={"html": str(path)}, render=lambda _: line)


def check_report_path(path: Path) -> None:
    """Refuse a path that nothing can be written to, before anything is measured for it.

    Raises:
        InputError: it is empty or a folder, or its folder does not exist.
    """
    if path.is_dir() or not path.name:
        raise InputError(f"--html: {str(path)!r} is a folder, expected a file")
    if not path.parent.is_dir():
        raise InputError(f"--html: {path}: its folder does not exist")


def write_report(sources: Sequence[Path], path: Path) -> str:
    """Write the report of some sources; return a line that says where it is.

    Raises:
        InputError: a source cannot be read or holds nothing to report, or the file cannot be written.
    """
    from moe_optimizer.measure.report.inputs import read_inputs
    from moe_optimizer.measure.report.page import render_page

    page = render_page(read_inputs(sources))
    try:
        write_atomically(path, page)
    except OSError as error:
        raise InputError(f"--html: {path}: {error.strerror or error}") from None
    return f"report written to {path}"
