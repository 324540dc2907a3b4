"""Runs the tuning in a process of its own, with a progress bar on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_optimizer.cli.progress import ProgressBar, ProgressLines
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.measure.process import MeasurementError, run_measurement

_MODULE = "moe_optimizer.measure.triton_tuning.tune"
_GRACE_S = 10.0


def run_tuning(
    request: Mapping[str, Any], progress: ProgressLines, *, log: Path, module: str = _MODULE
) -> list[dict[str, Any]]:
    """Run a tuning to its end and return its verdicts. No process of the tuning outlives this call.

    Args:
        request: a `TuneRequest` as an object.
        progress: takes a line for each thing done, where there is no terminal for a bar.
        log: what vLLM and Triton print goes here.
        module: the measuring process.

    Raises:
        InputError, UnsupportedError: the tuning refused.
        MoeOptimizerError: it died; what was measured is kept, and the next run goes on from there.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with clean_termination(), ProgressBar("tuning", lines=progress) as bar:
        try:
            return run_measurement(module, request, on_step=bar.show, log=log, grace_s=_GRACE_S)
        except MeasurementError as error:
            raise MoeOptimizerError(
                f"the tuning ended: {error}",
                hint=f"run it again: it resumes without the configuration that failed; log: {log}",
            ) from None
