"""Runs `moe-optimizer bench --engine embedded --ablate`: what each optimization of the embedded engine is worth."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from moe_optimizer.cli import messages
from moe_optimizer.cli.embedded import ENGINE
from moe_optimizer.cli.measuring_options import BenchOptions
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.errors import InputError

_TAKEN = ("model", "model_argument", "engine", "ablate", "dtype", "repetitions", "json", "verbose")
_DEFAULT_TURNS = 3


def ablate(options: BenchOptions) -> messages.Output:
    """Climb from a naive loop up, one optimization at a time, on requests of random lengths.

    Raises:
        InputError: an option says how servers are measured, or one of the two is missing.
        UnsupportedError: a package of the engine is missing.
        MoeOptimizerError: the engine cannot run the model.
    """
    from moe_optimizer.cli.engine_checks import check_packages
    from moe_optimizer.inspection.hardware_probe import probe_hardware
    from moe_optimizer.measure.ablation.run import render, run_ablation
    from moe_optimizer.measure.ablation.rungs import AblationSettings

    _check_alone(options)
    check_packages()
    settings = AblationSettings(
        model=str(Path(options.model_name).expanduser()),
        on_gpu=probe_hardware().gpu is not None,
        dtype=options.dtype or "auto",
        turns=options.repetitions or _DEFAULT_TURNS,
    )
    lines = ProgressLines(verbose=options.verbose)
    lines.release()
    with tempfile.TemporaryDirectory() as folder, progress_bar("ablate", lines=lines) as show:
        result = run_ablation(settings, log_folder=Path(folder), on_step=show)
    return messages.Output(result=result, render=render)


def _check_alone(options: BenchOptions) -> None:
    if options.engine != ENGINE or not options.ablate:
        given = f"--engine {options.engine or 'vllm'}{' --ablate' * options.ablate}"
        raise InputError(
            f"got {given}, expected --engine {ENGINE} and --ablate together",
            hint="without both, bench measures servers of vLLM",
        )
    switches = [f"--{'enable' if value else 'disable'}-{name}" for name, value in options.switches.items()]
    said = {"switches": " ".join(switches), "vllm_args": "arguments after --"}
    without = BenchOptions()
    for field in dataclasses.fields(options):
        if field.name not in _TAKEN and getattr(options, field.name) != getattr(without, field.name):
            flag = said.get(field.name) or f"--{field.name.replace('_', '-')}"
            raise InputError(f"{flag}: --ablate starts no servers", hint="leave it out")
