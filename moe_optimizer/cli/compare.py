"""Runs `moe-optimizer compare`: two results of bench side by side."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.measuring_options import CompareResultsOptions
from moe_optimizer.errors import InputError


@takes(CompareResultsOptions)
def command(options: CompareResultsOptions) -> messages.Output:
    """Put two results of bench side by side.

    Results of different machines, versions, models or workloads are refused: --allow-different shows them all the same,
    with what differs. The runs were not made in turns, so there are ratios but no verdicts.
    """
    from moe_optimizer.measure.report.comparison import compare_results, read_measured, render

    if options.first is None or options.second is None:
        raise InputError("A and B: two results are needed", hint="moe-optimizer compare A.json B.json")
    found = compare_results(
        read_measured(Path(options.first)), read_measured(Path(options.second)), allow_different=options.allow_different
    )
    return messages.Output(result=found, render=render)
