"""Measures the expert kernels before a server starts, where the plan has a question that no table answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.log import get_logger
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan_context.cpu_cores import BINDING

if TYPE_CHECKING:
    from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
    from moe_optimizer.plan.plan import Plan

logger = get_logger(__name__)


def measure_if_needed(plan: Plan, seconds: float, progress: ProgressLines) -> bool:
    """Measure what the plan asks for, in at most so many seconds besides the start of a process.

    Returns:
        Whether there is something new to plan with; a measurement that failed is a warning.
    """
    request = speed_request(plan, seconds)
    if request is None or seconds <= 0:
        return False
    progress.line(f"measuring expert kernels for up to {seconds:g} s (once; --calibrate 0 leaves it out)")
    progress.release()
    try:
        measure(request, lines=progress)
    except MoeOptimizerError as error:
        logger.warning("kernels are not measured: %s", error)
        return False
    return True


def measure(request: SpeedRequest, *, lines: ProgressLines | None = None) -> None:
    """Measure with a progress bar.

    Raises:
        MoeOptimizerError: nothing was measured; the message says why.
    """
    from moe_optimizer.measure.kernel_speeds import tables

    with progress_bar("kernels", lines=lines) as show:
        tables.measure_speeds(request, on_step=show)


def speed_request(plan: Plan, seconds: float) -> SpeedRequest | None:
    """Return what to measure for a plan on this machine; None when tables answer all its questions."""
    from moe_optimizer.launcher.compile_caches import compile_caches
    from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest

    kernels = plan.decision("flash_dmoe").params
    if not isinstance(kernels, FlashDmoeParams) or not kernels.measure:
        return None
    return SpeedRequest(
        device="cuda" if plan.num_gpus else "cpu",
        questions=kernels.measure,
        seconds=seconds,
        cores=kernels.cores,
        environment=compile_caches(plan, os.environ)
        | {name: value for name, value in plan.serve_env.items() if name != BINDING},
    )
