"""Times calls of a layer by several kernels that take turns; those that lose are left out early."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.measure.kernel_speeds.schedule import without_losers
from moe_optimizer.specs.kernel_speeds import STOCK

Calls = Mapping[str, Sequence[Callable[[], Any]]]
"""Kernel -> calls of one sample."""
Sampler = Callable[[str], float]
"""Kernel -> microseconds of one of its calls."""
_REPETITIONS = 7
_FEWEST = 3
"""Repetitions even if the time is over."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one layer at one number of tokens."""

    times_us: Mapping[str, float]
    first_us: Mapping[str, float]
    """First sample of each kernel, also of those that were left out after it."""
    spread: float
    """Distance of the quartiles of vLLM's kernel, as a share of its median."""


def timed(calls: Calls, device: str, deadline: float) -> Timed:
    """Return the time of a call by each kernel that is not clearly slower than others."""
    # What else runs on a processor only ever adds to a time.
    summary = statistics.median if device == "cuda" else min
    return repeated(sampler_of(calls, device), tuple(calls), deadline, summary)


def sampler_of(calls: Calls, device: str) -> Sampler:
    """Return what times the kernels on a device; each has run once then."""
    return cuda_sampler(calls) if device == "cuda" else cpu_sampler(calls)


def repeated(
    sampler: Sampler, names: Sequence[str], deadline: float, summary: Callable[[Sequence[float]], float]
) -> Timed:
    """Sample each kernel in turns until the deadline, but at least a few times, and summarise its samples."""
    first = {name: sampler(name) for name in names}
    samples = {name: [first[name]] for name in without_losers(first)}
    for repetition in range(1, _REPETITIONS):
        if repetition >= _FEWEST and time.monotonic() > deadline:
            break
        for name, each in samples.items():
            each.append(sampler(name))
    low, median, high = statistics.quantiles(samples[STOCK], n=4)
    times = {name: round(summary(each), 3) for name, each in samples.items()}
    return Timed(times, first, (high - low) / median)


def cpu_sampler(calls: Calls) -> Sampler:
    """Return what times the calls of a kernel one after the other."""
    for each in calls.values():
        each[0]()

    def sample(name: str) -> float:
        start = time.perf_counter()
        for call in calls[name]:
            call()
        return 1e6 * (time.perf_counter() - start) / len(calls[name])

    return sample


def cuda_sampler(calls: Calls) -> Sampler:
    """Return what times a CUDA graph of the calls of a kernel: as a decode step runs them, without Python."""
    import torch

    graphs = {}
    stream = torch.cuda.Stream()
    for name, each in calls.items():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in each:
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
