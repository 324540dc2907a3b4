"""Measures the links of this machine, and keeps the tables in the user's folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.inspection.links import keep_links
from moe_optimizer.measure.links.measurement import LinkRequest
from moe_optimizer.measure.process import OnStep, run_measurement
from moe_optimizer.plan.json_codec import decode
from moe_optimizer.specs.links import LinkTimes

_MODULE = "moe_optimizer.measure.links.measurement"
_TIMEOUT_S = 600.0
_GRACE_S = 10.0


def measure_links(request: LinkRequest, *, on_step: OnStep, cache: Path | None = None) -> tuple[LinkTimes, ...]:
    """Measure in a process of its own, and keep a table for each number of devices, in the place of an earlier one.

    Args:
        request: what to measure.
        on_step: called with the share that is done, and what was done.
        cache: the folder; None: this package's.

    Raises:
        MoeOptimizerError: there are no tables, or they cannot be written; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-links-") as folder:
        found = run_measurement(
            _MODULE, request, on_step=on_step, log=Path(folder) / "log.txt", timeout_s=_TIMEOUT_S, grace_s=_GRACE_S
        )
    tables = tuple(decode(LinkTimes, each, origin="links") for each in found)
    try:
        for table in tables:
            keep_links(table, cache)
    except OSError as error:
        raise MoeOptimizerError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return tables
