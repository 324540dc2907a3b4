"""Runs `moe-optimizer tune`: finds the plan that serves a workload best on this machine, within a budget of time."""

from __future__ import annotations

import dataclasses
import shlex

from moe_optimizer.cli import INTERRUPTED, messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.measuring_options import ONLY_TRITON, TuneOptions
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.cli.tune_triton import tune_triton
from moe_optimizer.errors import ExitCode, InputError

_OF_SERVED = ("workload", "clients", "rates", "requests_per_client", "goal", "repetitions", "seed", "run_dir")
"""Options of the steps that start servers."""


@takes(TuneOptions)
def command(options: TuneOptions) -> messages.Output:
    """Find the plan that serves a model best on this machine.

    Measures the plan against stock vLLM, each of its passes on and off, then settings of vLLM, all in turns and under
    the same requests. What does not win is off; answers that changed are judged as `quality` does. Writes a plan for
    run_optimizer.py --plan, and a ledger of what was tried. With --resume, a stopped run goes on where it was.
    Exit code 4 if no plan keeps the limits of --goal. With --only triton: tunes only vLLM's Triton MoE kernel.
    """
    if options.only == ONLY_TRITON:
        _check_triton_alone(options)
        return tune_triton(options)
    from moe_optimizer.cli.tuning import Tuning
    from moe_optimizer.measure.tune.setting_search import check_optuna
    from moe_optimizer.measure.tune.table import render

    check_optuna()
    tuning = Tuning(options, ProgressLines(verbose=options.verbose))
    result = tuning.result()
    notes = ()
    if result.ended != "done":
        end, longer = ("the budget", " and a larger --budget") if result.ended == "budget" else ("the interrupt", "")
        so_far = "no plan was written" if result.plan_file is None else f"{result.plan_file} is the best until then"
        notes = (
            f"not everything was tried before {end}; {so_far}; "
            f"--resume --run-dir {shlex.quote(str(tuning.folder))}{longer} goes on",
        )
    code: int = ExitCode.OK if result.met else ExitCode.GOAL_MISSED
    code = INTERRUPTED if result.ended == "interrupted" else code
    return messages.Output(result=result, render=render, notes=notes, code=code)


def _check_triton_alone(options: TuneOptions) -> None:
    """Refuse options of the steps that are left out.

    Raises:
        InputError: names one.
    """
    for field in dataclasses.fields(TuneOptions):
        if field.name in _OF_SERVED and getattr(options, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise InputError(f"{flag}: --only triton serves no requests and searches no settings", hint="leave it out")
