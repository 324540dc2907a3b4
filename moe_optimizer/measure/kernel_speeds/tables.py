"""Measures the kernel speeds that a plan asks for, and keeps them as tables in the user's folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from moe_optimizer.errors import InputError, MoeOptimizerError
from moe_optimizer.inspection.kernel_speeds import measured_dir, read_tables, write_tables
from moe_optimizer.log import get_logger
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.kernel_speeds.peers import has_ended
from moe_optimizer.measure.kernel_speeds.worker_environment import worker_environment
from moe_optimizer.measure.process import MeasurementError, OnStep, run_measurement
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, SpeedQuestion

logger = get_logger(__name__)

_MODULE = "moe_optimizer.measure.kernel_speeds.measurement"
_START_UP_S = 180.0
"""Chosen: time to import vLLM and compile its kernels, besides the measurement itself."""


def measure_speeds(
    request: SpeedRequest,
    *,
    on_step: OnStep,
    cache: Path | None = None,
    module: str = _MODULE,
    start_up_s: float = _START_UP_S,
) -> None:
    """Measure in a process of its own and keep one file per question, in the place of an earlier one.

    What an earlier measurement left unfinished is gone on with. What is measured when this one is interrupted, or its
    process ends early, is kept. Where a backend of vLLM's ended it, it goes on at once without that one.

    Args:
        request: what to measure; its `started` and `tables` are set here.
        on_step: called with the share that is done, and what was done.
        cache: the user's folder; None: `measured_dir()`.
        module: the measuring process.
        start_up_s: what it may take besides the seconds of the request.

    Raises:
        MoeOptimizerError: there are no tables; the message says why.
    """
    folder = measured_dir() if cache is None else cache
    deadline = time.monotonic() + request.seconds
    while True:
        ended_before = _ended(folder, request.questions)
        error = _measure_once(
            replace(request, seconds=deadline - time.monotonic()), folder, on_step, module, start_up_s
        )
        if error is None:
            return
        ended = _ended(folder, request.questions) - ended_before
        if not ended or time.monotonic() > deadline:
            logger.warning("the measurement of kernels ended early, the next start goes on with it: %s", error)
            return
        logger.warning("vLLM's %s ended the measurement, which goes on without it: %s", " and ".join(ended), error)


def _measure_once(
    request: SpeedRequest, folder: Path, on_step: OnStep, module: str, start_up_s: float
) -> MeasurementError | None:
    """Measure until the process ends; return why it ended early, and None where it did not.

    Raises:
        MoeOptimizerError: there are no tables.
    """
    failed = None
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-speeds-") as name:
        tables = Path(name) / "tables.json"
        try:
            run_measurement(
                module,
                replace(request, started=_started(folder, request.questions), tables=str(tables)),
                on_step=on_step,
                log=Path(name) / "log.txt",
                environment=worker_environment(os.environ, request.environment, request.cores),
                timeout_s=request.seconds + start_up_s,
            )
        except MeasurementError as error:
            if not tables.exists():
                raise
            failed = error
        finally:
            if tables.exists():
                _keep(tables, folder)
        if not tables.exists():
            raise MoeOptimizerError("the measurement ended without a table")
    return failed


def _ended(folder: Path, questions: tuple[SpeedQuestion, ...]) -> set[str]:
    """Return vLLM's backends that ended a measurement of these questions."""
    return {name for table in _kept(folder, questions) for name, why in table.unavailable.items() if has_ended(why)}


def _keep(tables: Path, folder: Path) -> None:
    try:
        for table in read_tables(tables):
            write_tables(folder / f"{table_name(table)}.json", (table,))
    except (InputError, OSError) as error:
        raise MoeOptimizerError(str(error)) from None


def _kept(folder: Path, questions: tuple[SpeedQuestion, ...]) -> list[KernelSpeeds]:
    tables: list[KernelSpeeds] = []
    for question in questions:
        # A file that is missing or broken: there is nothing to go on with.
        with contextlib.suppress(InputError):
            tables += read_tables(folder / f"{table_name(question)}.json")
    return tables


def _started(folder: Path, questions: tuple[SpeedQuestion, ...]) -> tuple[KernelSpeeds, ...]:
    """Return the tables that an earlier measurement of these questions left unfinished."""
    return tuple(
        table for table in _kept(folder, questions) if table.unfinished or not (table.backend or table.disturbed)
    )


def table_name(table: SpeedQuestion) -> str:
    """Return the file name of the answer to one question: device, and a digest of everything it depends on."""
    key = [table.device, table.weights, encode(table.shape), table.kernel_hash, table.vllm]
    key += [table.driver, table.torch, table.triton, table.environment]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    device = "".join(char if char.isalnum() else "-" for char in table.device.lower())[:40].strip("-")
    return f"{device}-{digest}"
