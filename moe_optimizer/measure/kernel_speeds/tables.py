"""Measures the kernel speeds that a plan asks for, and keeps them as tables in the user's folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from moe_optimizer.errors import InputError, MoeOptimizerError
from moe_optimizer.inspection.kernel_speeds import measured_dir, read_tables, write_tables
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.process import OnStep, run_measurement
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, SpeedQuestion

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

    Args:
        request: what to measure; its `tables` is set here.
        on_step: called with the share that is done, and what was done.
        cache: the user's folder; None: `measured_dir()`.
        module: the measuring process.
        start_up_s: what it may take besides the seconds of the request.

    Raises:
        MoeOptimizerError: there are no tables; the message says why.
    """
    # Without the plugin: the classes are measured as they are, beside those of stock vLLM.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MOE_OPTIMIZER_")}
    if request.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(request.threads)
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-speeds-") as name:
        tables = Path(name) / "tables.json"
        run_measurement(
            module,
            encode(request) | {"tables": str(tables)},
            on_step=on_step,
            log=Path(name) / "log.txt",
            environment=environment,
            timeout_s=request.seconds + start_up_s,
        )
        try:
            for table in read_tables(tables):
                write_tables((measured_dir() if cache is None else cache) / f"{table_name(table)}.json", (table,))
        except (InputError, OSError) as error:
            raise MoeOptimizerError(str(error)) from None


def table_name(table: KernelSpeeds | SpeedQuestion) -> str:
    """Return the file name of the answer to one question: device, and a digest of everything it depends on."""
    key = [table.device, table.weights, encode(table.shape), table.kernel_hash, table.vllm]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    device = "".join(char if char.isalnum() else "-" for char in table.device.lower())[:40].strip("-")
    return f"{device}-{digest}"
