"""Measures the expert kernels before a server starts, where the plan has a question that no table answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.cli.progress import ProgressBar, ProgressLines
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.log import get_logger

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
    try:
        measure(request)
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

    with clean_termination(), ProgressBar("kernels", lines=lines) as bar:
        tables.measure_speeds(request, on_step=bar.show)


def speed_request(plan: Plan, seconds: float) -> SpeedRequest | None:
    """Return what to measure for a plan on this machine; None when tables answer all its questions."""
    from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
    from moe_optimizer.plan.json_codec import decode
    from moe_optimizer.specs.kernel_speeds import SpeedQuestion

    asked = [question for each in plan.decisions for question in each.params.get("measure", ())]
    if not asked:
        return None
    on_cpu = plan.num_gpus == 0
    return SpeedRequest(
        device="cpu" if on_cpu else "cuda",
        questions=tuple(decode(SpeedQuestion, question, origin="plan") for question in asked),
        seconds=seconds,
        threads=max(1, plan.hardware.cpu.cores // _processes(plan)) if on_cpu and plan.hardware.cpu else 1,
        tables="",
    )


def _processes(plan: Plan) -> int:
    """Return how many workers share the processor."""
    (parallelism,) = [each for each in plan.decisions if each.pass_name == "parallelism"]
    return parallelism.params["tensor_parallel_size"]
