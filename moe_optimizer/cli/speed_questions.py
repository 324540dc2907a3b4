"""Measuring the kernels before a server starts, where the plan has a question that no table answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import printable
from moe_optimizer.log import get_logger
from moe_optimizer.plan.pass_params import FlashDmoeParams

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan

_LOGGER = get_logger(__name__)


def measure_if_needed(plan: Plan, seconds: float, progress: ProgressLines) -> bool:
    """Measure what the plan asks for, at most so long beside the start of a process. Returns whether there is something
    new to plan with.
    """
    kernels = plan.decision("flash_dmoe").params
    if not isinstance(kernels, FlashDmoeParams) or not kernels.measure or seconds <= 0:
        return False
    from moe_optimizer.measure.kernel_speeds.calibration import calibrate
    from moe_optimizer.measure.kernel_speeds.measurement import Request

    on_cpu, cpu = plan.num_gpus == 0, plan.hardware.cpu
    request = Request(
        device="cpu" if on_cpu else "cuda",
        questions=kernels.measure,
        seconds=seconds,
        threads=max(1, cpu.cores // plan.parallelism.tensor_parallel_size) if on_cpu and cpu else 1,
        tables="",
    )
    progress.line(f"measuring expert kernels for up to {seconds:g} s (once; --calibrate 0 leaves it out)")
    with clean_termination(), _Bar() as bar:
        why_not = calibrate(request, on_step=bar.step)
    if why_not:
        _LOGGER.warning("kernels are not measured: %s", why_not)
    return not why_not


class _Bar:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self._update: Callable[[int, int, str], None] | None = None

    def __enter__(self) -> _Bar:
        if not sys.stderr.isatty():
            return self
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True, no_color=not messages.use_color(sys.stderr))
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[what]}"))
        self._rich = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        task = self._rich.add_task("kernels", total=None, what="starting")
        self._rich.start()
        self._update = lambda done, of, what: self._rich.update(task, completed=done, total=of, what=printable(what))
        return self

    def __exit__(self, *_: object) -> None:
        if self._update is not None:
            self._rich.stop()

    def step(self, done: int, of: int, what: str) -> None:
        """Show one step."""
        if self._update is not None:
            self._update(done, of, what)
