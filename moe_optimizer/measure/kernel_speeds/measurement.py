"""Measures the expert kernels of a layer, ours and vLLM's own: a process of its own, see `measure.process`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.inspection.kernel_speeds import write_tables
from moe_optimizer.measure.kernel_speeds.disturbance import busy_before, unsteady
from moe_optimizer.measure.kernel_speeds.schedule import Rows, next_size, share_done, worth_timing
from moe_optimizer.measure.kernel_speeds.timing import Timed, timed
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.specs.kernel_speeds import STOCK, KernelSpeeds, SpeedQuestion, TokenSpeeds

if TYPE_CHECKING:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

_CALLS = 8
"""Calls of one sample, each with its own routing."""
_CUDA_LAYERS_BYTES = 256 << 20
"""Chosen: several times the 50 to 60 MB of L2 of a Hopper GPU. Layers are added until there is as much."""
_MAX_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRequest:
    """What to measure and for how long."""

    device: str
    """"cuda" or "cpu"."""
    questions: tuple[SpeedQuestion, ...]
    """The most important first: it may take all the time."""
    seconds: float
    """For everything, without start-up."""
    cores: tuple[int, ...] = ()
    """Of the CPU worker that is measured for; () on GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The plan's variables."""
    started: tuple[KernelSpeeds, ...] = ()
    """Tables to go on with."""
    tables: str = ""
    """File that gets the tables, again after each number of tokens."""


class KernelTimer:
    """Times the kernels of a layer on the device of a request."""

    def __init__(self, request: SpeedRequest) -> None:
        self._device = request.device
        self._cores = request.cores

    def prepare(self) -> None:
        """Set this process up as a worker of vLLM is, before its first layer."""
        import torch

        if self._device == "cpu":
            torch.set_num_threads(len(self._cores))
            return
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device("cuda"))

    def layers(self, question: SpeedQuestion) -> list[MeasuredLayer]:
        """Return so many layers that a GPU's cache does not hold their weights; on the CPU one."""
        from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

        first = MeasuredLayer(question, device=self._device, seed=0)
        if self._device == "cpu":
            return [first]
        size = first.w13.nbytes + first.w2.nbytes
        count = min(_MAX_LAYERS, max(2, -(-_CUDA_LAYERS_BYTES // size)))
        return [first, *(MeasuredLayer(question, device=self._device, seed=seed) for seed in range(1, count))]

    def timed(self, layers: list[MeasuredLayer], tokens: int, rows: Rows, deadline: float) -> Timed:
        """Time the kernels that are worth it; every call has a routing of its own, and layers take turns."""
        from moe_optimizer.measure.kernel_speeds.measured_sides import ours_for, sides_for

        names = worth_timing(ours_for(layers[0], tokens), tokens, rows)
        per_layer = [sides_for(layer, names) for layer in layers]
        inputs = [layers[index % len(layers)].inputs(tokens, index) for index in range(_CALLS)]
        calls = {
            name: [per_layer[index % len(layers)][name](*given) for index, given in enumerate(inputs)]
            for name in per_layer[0]
        }
        return timed(calls, layers[0].device, deadline)


class _Measurement:
    """The tables of a request as they grow."""

    def __init__(self, request: SpeedRequest, on_step: OnStep, timer: KernelTimer) -> None:
        self._request = request
        self._timer = timer
        self._on_step = on_step
        self._rows = [_rows_of(question, request.started) for question in request.questions]
        self._spreads: list[list[float]] = [[] for _ in request.questions]
        self._busy = busy_before(request.device, request.cores)
        self._measured = 0

    def run(self) -> None:
        """Measure until nothing is left or the time is over, but at least one number of tokens."""
        self._timer.prepare()
        deadline = time.monotonic() + self._request.seconds
        for index, question in enumerate(self._request.questions):
            if self._time_is_left(deadline):
                self._measure(index, question, deadline)
        self._write()

    def _time_is_left(self, deadline: float) -> bool:
        return time.monotonic() < deadline or not self._measured

    def _measure(self, index: int, question: SpeedQuestion, deadline: float) -> None:
        device, rows = self._request.device, self._rows[index]
        layers = [] if next_size(device, rows) is None else self._timer.layers(question)
        while (tokens := next_size(device, rows)) is not None and self._time_is_left(deadline):
            times = self._timer.timed(layers, tokens, rows, deadline)
            ours = {name: time_us for name, time_us in times.times_us.items() if name != STOCK}
            rows[tokens] = TokenSpeeds(tokens=tokens, stock_us=times.times_us[STOCK], ours_us=ours)
            self._spreads[index].append(times.spread)
            self._measured += 1
            self._write()
            done = (index + share_done(device, rows)) / len(self._request.questions)
            self._on_step(done, f"{tokens} tokens, {question.weights}")

    def _write(self) -> None:
        tables = (
            self._table(question, rows, spreads)
            for question, rows, spreads in zip(self._request.questions, self._rows, self._spreads, strict=True)
            if rows
        )
        write_tables(Path(self._request.tables), tuple(tables))

    def _table(self, question: SpeedQuestion, rows: Rows, spreads: list[float]) -> KernelSpeeds:
        return KernelSpeeds(
            **{each.name: getattr(question, each.name) for each in fields(question)},
            rows=tuple(rows[tokens] for tokens in sorted(rows)),
            source=f"measured here on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            measured_here=True,
            unfinished=next_size(self._request.device, rows) is not None,
            disturbed=self._disturbed(question, spreads),
        )

    def _disturbed(self, question: SpeedQuestion, spreads: list[float]) -> str:
        """Return what disturbed the measurement, now or before it was gone on with."""
        before = [table.disturbed for table in self._request.started if not question.why_not(table)]
        return " and ".join(dict.fromkeys(filter(None, (*before, self._busy, unsteady(spreads)))))


def measure(request: SpeedRequest, on_step: OnStep, timer: KernelTimer | None = None) -> None:
    """Measure what `request` asks and write its tables; `timer` as default times real layers on its device."""
    _Measurement(request, on_step, timer or KernelTimer(request)).run()


def _rows_of(question: SpeedQuestion, started: tuple[KernelSpeeds, ...]) -> dict[int, TokenSpeeds]:
    return {row.tokens: row for table in started if not question.why_not(table) for row in table.rows}


if __name__ == "__main__":
    sys.exit(answer_request(SpeedRequest, sys.argv[1:], measure))
