"""Times calls of ours beside vLLM's in CUDA graphs while a worker loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

MARGIN = 0.97
"""Chosen: ours has to take at most so much of vLLM's time, so that noise does not choose."""
_REPETITIONS = 30
"""Of a few milliseconds each: several workers that load on one GPU reach this at the same time and take turns on it."""


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, in their order, on the current device."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # what is allocated or loaded once is not in the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def least_us(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Return the microseconds of each graph, replayed in turns. The least: others may load on this GPU meanwhile."""
    samples: list[list[float]] = [[] for _ in graphs]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for repetition in range(_REPETITIONS + 1):  # the first one warms up
        for graph, found in zip(graphs, samples, strict=True):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repetition:
                found.append(1000 * start.elapsed_time(end))
    return [min(each) for each in samples]


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the one stream of all captures: torch keeps a workspace of cuBLAS for each that multiplies."""
    return torch.cuda.Stream(device)
