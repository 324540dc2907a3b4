"""Measures the expert kernels of a layer, ours and vLLM's own: a process of its own, see `measure.process`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.inspection.kernel_speeds import write_tables
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.specs.kernel_speeds import STOCK, KernelSpeeds, SpeedQuestion, TokenSpeeds

if TYPE_CHECKING:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

ORDER = {
    "cuda": (1, 8, 64, 4, 2, 16, 32, 128, 256, 512, 1024, 2048, 4096, 8192),
    "cpu": (1, 16, 256, 4, 64),
}
"""Numbers of tokens in order of importance: the budget may not reach the last."""
_CALLS = 8
"""Calls of one sample, each with its own routing."""
_REPETITIONS = 7
_CUDA_LAYERS_BYTES = 256 << 20
"""Chosen: several times the 50 to 60 MB of L2 of a Hopper GPU. Layers are added until there is as much."""
_MAX_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRequest:
    """What to measure and for how long."""

    device: str
    """"cuda" or "cpu"."""
    questions: tuple[SpeedQuestion, ...]
    seconds: float
    """For everything, without start-up."""
    threads: int
    """Of a measurement on the CPU."""
    tables: str
    """File that gets the tables, whole or not at all."""


def _measure(request: SpeedRequest, on_step: OnStep) -> None:
    _prepare(request)
    tables, sizes = [], ORDER[request.device]
    for index, question in enumerate(request.questions):
        deadline = time.monotonic() + request.seconds / len(request.questions)
        rows: list[TokenSpeeds] = []
        for row in _rows(question, request.device, deadline):
            rows.append(row)
            done = (index + len(rows) / len(sizes)) / len(request.questions)
            on_step(done, f"{row.tokens} tokens, {question.weights}")
        tables.append(_table(question, rows))
    write_tables(Path(request.tables), tuple(tables))


def _prepare(request: SpeedRequest) -> None:
    import torch

    if request.device == "cpu":
        torch.set_num_threads(request.threads)
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda"))


def _table(question: SpeedQuestion, rows: list[TokenSpeeds]) -> KernelSpeeds:
    import torch

    return KernelSpeeds(
        device=question.device,
        weights=question.weights,
        shape=question.shape,
        kernel_hash=question.kernel_hash,
        vllm=question.vllm,
        driver=question.driver,
        rows=tuple(sorted(rows, key=lambda row: row.tokens)),
        source=f"measured here on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        torch=str(torch.__version__),
        measured_here=True,
    )


def _rows(question: SpeedQuestion, device: str, deadline: float) -> Iterator[TokenSpeeds]:
    """Measure until the time is over, but at least one number of tokens."""
    layers = _layers(question, device)
    for index, tokens in enumerate(ORDER[device]):
        if index and time.monotonic() > deadline:
            return
        times = _medians_us(layers, tokens, deadline)
        stock = times.pop(STOCK)
        yield TokenSpeeds(tokens=tokens, stock_us=stock, ours_us=times)


def _layers(question: SpeedQuestion, device: str) -> list[MeasuredLayer]:
    from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer

    first = MeasuredLayer(question, device=device, seed=0)
    if device == "cpu":
        return [first]
    size = first.w13.nbytes + first.w2.nbytes
    count = min(_MAX_LAYERS, max(2, -(-_CUDA_LAYERS_BYTES // size)))
    return [first, *(MeasuredLayer(question, device=device, seed=seed) for seed in range(1, count))]


def _medians_us(layers: list[MeasuredLayer], tokens: int, deadline: float) -> dict[str, float]:
    """Return the median time of a call of each kernel; kernels take turns, and every call has a routing of its own."""
    from moe_optimizer.measure.kernel_speeds.measured_sides import sides_for

    per_layer = [sides_for(layer, tokens) for layer in layers]
    calls = {
        name: [per_layer[index % len(layers)][name](tokens, index) for index in range(_CALLS)] for name in per_layer[0]
    }
    sampler = _cuda_sampler(calls) if layers[0].device == "cuda" else _cpu_sampler(calls)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(_REPETITIONS):
        if repetition > 2 and time.monotonic() > deadline:
            break
        for name in calls:
            samples[name].append(round(sampler(name), 3))
    return {name: statistics.median(times) for name, times in samples.items()}


def _cpu_sampler(calls: dict[str, list[Any]]) -> Any:
    for each in calls.values():
        each[0]()

    def sample(name: str) -> float:
        start = time.perf_counter()
        for call in calls[name]:
            call()
        return 1e6 * (time.perf_counter() - start) / len(calls[name])

    return sample


def _cuda_sampler(calls: dict[str, list[Any]]) -> Any:
    """Capture the calls of each kernel in one graph, as a server replays them while it decodes."""
    import torch

    stream = torch.cuda.Stream()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, each in calls.items():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in each * 2:
                call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for call in each:
                call()
        graphs[name].replay()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample(name: str) -> float:
        start.record()
        graphs[name].replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / len(calls[name])

    return sample


if __name__ == "__main__":
    sys.exit(answer_request(SpeedRequest, sys.argv[1:], _measure))
