"""Measures the expert kernels of a layer, ours and vLLM's own: a process of its own, see `measure.process`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.errors import described
from moe_optimizer.inspection.kernel_speeds import write_tables
from moe_optimizer.measure.kernel_speeds.disturbance import busy_before, unsteady
from moe_optimizer.measure.kernel_speeds.peers import Compared, Peers
from moe_optimizer.measure.kernel_speeds.schedule import Rows, next_size, share_done, worth_timing
from moe_optimizer.measure.kernel_speeds.timing import Timed, timed
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.specs.kernel_speeds import STOCK, STOCK_BACKENDS, KernelSpeeds, SpeedQuestion, TokenSpeeds

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


class _Measurement:
    """The tables of a request as they grow."""

    def __init__(self, request: SpeedRequest, on_step: OnStep) -> None:
        self._request = request
        self._on_step = on_step
        self._rows = [_rows_of(question, request.started) for question in request.questions]
        self._compared = [_compared_before(question, request.started) for question in request.questions]
        self._spreads: list[list[float]] = [[] for _ in request.questions]
        self._busy = busy_before(request.device, request.cores)
        self._measured = 0

    def run(self) -> None:
        """Measure until nothing is left or the time is over, but at least one number of tokens."""
        _prepare(self._request)
        deadline = time.monotonic() + self._request.seconds
        for index, question in enumerate(self._request.questions):
            if self._time_is_left(deadline):
                self._measure(index, question, deadline)
        self._write()

    def _time_is_left(self, deadline: float) -> bool:
        return time.monotonic() < deadline or not self._measured

    def _measure(self, index: int, question: SpeedQuestion, deadline: float) -> None:
        """Measure ours beside the kernel of vLLM's that shares their weights, then vLLM's other backends."""
        device, rows = self._request.device, self._rows[index]
        if next_size(device, rows) is None and self._compared[index].backend:
            return
        layers = _layers(question, device)
        while (tokens := next_size(device, rows)) is not None and self._time_is_left(deadline):
            times = _timed(layers, tokens, rows, deadline)
            ours = {name: time_us for name, time_us in times.times_us.items() if name != STOCK}
            rows[tokens] = TokenSpeeds(tokens=tokens, stock_us=times.times_us[STOCK], ours_us=ours)
            self._spreads[index].append(times.spread)
            self._step(index, f"{tokens} tokens, {question.weights}")
        if next_size(device, rows) is None and self._time_is_left(deadline):
            self._step(index, f"other backends of vLLM, {question.weights}")
            self._compare(index, layers, deadline)

    def _compare(self, index: int, layers: list[MeasuredLayer], deadline: float) -> None:
        compared = self._compared[index]
        try:
            peers = Peers(layers, compared, self._write)
        except Exception as error:  # noqa: BLE001 - another vLLM than known: ours are measured, and its other kernels not
            compared.backend = STOCK_BACKENDS[self._request.device]
            compared.unavailable["other"] = f"this vLLM does not tell of them as known: {described(error)}"
            return
        peers.compare(self._rows[index], lambda: self._time_is_left(deadline), deadline)

    def _step(self, index: int, what: str) -> None:
        self._measured += 1
        self._write()
        done = (index + share_done(self._request.device, self._rows[index])) / len(self._request.questions)
        self._on_step(done, what)

    def _write(self) -> None:
        tables = (
            self._table(index, question, rows)
            for index, (question, rows) in enumerate(zip(self._request.questions, self._rows, strict=True))
            if rows
        )
        write_tables(Path(self._request.tables), tuple(tables))

    def _table(self, index: int, question: SpeedQuestion, rows: Rows) -> KernelSpeeds:
        compared = self._compared[index]
        return KernelSpeeds(
            **{each.name: getattr(question, each.name) for each in fields(question)},
            rows=tuple(rows[tokens] for tokens in sorted(rows)),
            source=f"measured here on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            measured_here=True,
            unfinished=next_size(self._request.device, rows) is not None,
            disturbed=self._disturbed(question, self._spreads[index]),
            backend=compared.backend,
            unavailable=dict(compared.unavailable),
        )

    def _disturbed(self, question: SpeedQuestion, spreads: list[float]) -> str:
        """Return what disturbed the measurement first: before it was gone on with, or else now."""
        before = (table.disturbed for table in self._request.started if not question.why_not(table))
        now = " and ".join(filter(None, (self._busy, unsteady(spreads))))
        return next(filter(None, before), now)


def _measure(request: SpeedRequest, on_step: OnStep) -> None:
    _Measurement(request, on_step).run()


def _rows_of(question: SpeedQuestion, started: tuple[KernelSpeeds, ...]) -> dict[int, TokenSpeeds]:
    return {row.tokens: row for table in started if not question.why_not(table) for row in table.rows}


def _compared_before(question: SpeedQuestion, started: tuple[KernelSpeeds, ...]) -> Compared:
    for table in started:
        if not question.why_not(table):
            return Compared(backend=table.backend, unavailable=dict(table.unavailable))
    return Compared()


def _prepare(request: SpeedRequest) -> None:
    import torch

    if request.device == "cpu":
        torch.set_num_threads(len(request.cores))
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda"))


def _layers(question: SpeedQuestion, device: str) -> list[MeasuredLayer]:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

    first = MeasuredLayer(question, device=device, seed=0)
    if device == "cpu":
        return [first]
    size = first.w13.nbytes + first.w2.nbytes
    count = min(_MAX_LAYERS, max(2, -(-_CUDA_LAYERS_BYTES // size)))
    return [first, *(MeasuredLayer(question, device=device, seed=seed) for seed in range(1, count))]


def _timed(layers: list[MeasuredLayer], tokens: int, rows: Rows, deadline: float) -> Timed:
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


if __name__ == "__main__":
    sys.exit(answer_request(SpeedRequest, sys.argv[1:], _measure))
