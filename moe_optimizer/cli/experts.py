"""Runs `moe-optimizer experts`: shows which experts the traffic used, and how unevenly."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import ExpertsOptions
from moe_optimizer.costs.expert_imbalance import LoadReport, load_report
from moe_optimizer.errors import InputError
from moe_optimizer.specs.expert_load import LOAD_FILE, PARTS_DIR, ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOutput:
    """The token counts of the experts, and the figures computed from them."""

    load: ExpertLoad
    """The counts, as in the file expert_load.json."""
    report: LoadReport
    """How uneven the counts are."""


@takes(ExpertsOptions)
def command(options: ExpertsOptions) -> messages.Output:
    """Show which experts the traffic used: heatmap and imbalance.

    SOURCE is a run folder, an expert_load.json, or the URL of a server that was started with --enable-expert-load.
    """
    from moe_optimizer.cli.heatmap import render_load

    load = read_source(options.source)
    report = load_report(load)
    if options.png is not None:
        from moe_optimizer.cli.heatmap_png import write_heatmap

        write_heatmap(load, Path(options.png))
    unicode = _takes_blocks(sys.stdout.encoding)
    return messages.Output(
        result=ExpertsOutput(load=load, report=report),
        render=lambda _: render_load(load, report, width=messages.output_width(), top=options.top, unicode=unicode),
        notes=() if options.png is None else (f"heatmap written to {options.png}",),
    )


def read_source(source: str | None) -> ExpertLoad:
    """Return the expert load of a run folder, a file or a server.

    Raises:
        InputError: none is named, there is none, or it is not one.
        ServerFailedError: the server does not answer.
    """
    from moe_optimizer.cli.expert_metrics import read_metrics
    from moe_optimizer.inspection.expert_load import read_expert_load, read_run_load

    if not source:
        raise InputError("SOURCE: is missing", hint="give a run folder, expert_load.json or a URL")
    if source.startswith(("http://", "https://")):
        return read_metrics(source)
    path = Path(source)
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{source}: no such file or folder", hint="give a run folder, expert_load.json or a URL")
        return read_expert_load(path)
    if not (path / PARTS_DIR).is_dir() and (path / LOAD_FILE).is_file():
        return read_expert_load(path / LOAD_FILE)
    return read_run_load(path)


def _takes_blocks(encoding: str | None) -> bool:
    try:
        "░▒▓█".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
