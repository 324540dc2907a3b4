"""Timing for the CUDA benchmark: graphs, L2-cold rotation, interleaved repetitions, machine ceilings."""

from __future__ import annotations

import functools
import statistics
import subprocess

import torch
from bench_cuda_sides import Call


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    # One for all: our kernels keep counters per stream, and a stream too many would add their zeroing to the graph.
    return torch.cuda.Stream()


def capture(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls in order. Each call ran twice before: compilation and allocation are not in it."""
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls * 2:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def time_interleaved(sides: dict[str, list[Call]], *, repetitions: int = 7) -> dict[str, list[float]]:
    """Microseconds per call: every sample is one replay of all of a side's calls (one per weight set).

    Sides alternate within a repetition, so that a drifting clock meets all of them.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, calls in sides.items():
        graphs[name] = (capture(calls), len(calls))
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in sides}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(repetitions):
        for name, (graph, count) in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(1000 * start.elapsed_time(end) / count)
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """Median and spread of the samples."""
    return {"median_us": statistics.median(samples), "min_us": min(samples), "max_us": max(samples)}


def measure_ceilings() -> dict[str, float]:
    """Bytes per second of a device-to-device copy (read plus written) and BF16 FLOP/s of a large product."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_s = _best_of(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    b = torch.randn(8192, 8192, device="cuda").bfloat16()
    product_s = _best_of(lambda: a @ b)
    return {"copy_bytes_per_s": 2 * source.numel() / copy_s, "bf16_flops_per_s": 2 * 8192**3 / product_s}


def _best_of(work: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        work()
    times = []
    for _ in range(10):
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def device_facts() -> dict[str, str | None]:
    """What nvidia-smi says of the GPU, and the versions in use."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        shown = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=30,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        shown = None
    return {
        "nvidia_smi_fields": fields,
        "nvidia_smi": shown,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
        "multiprocessors": str(torch.cuda.get_device_properties(0).multi_processor_count),
    }
