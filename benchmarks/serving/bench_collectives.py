"""Measures the collectives of tensor, expert and data parallelism by size, as vLLM's layers call them.

    torchrun --nproc-per-node N benchmarks/serving/bench_collectives.py --out FILE [--custom] [--commit C]

NCCL all-reduce, all-gather and reduce-scatter of BF16, each replayed from a CUDA graph of CALLS calls; with --custom
also the all-reduce that vLLM uses inside its graphs (its communicator of a tensor parallel group: custom, symmetric
memory or NCCL, whichever it picks by size), last. Medians over rounds; the slowest rank counts. The record is written
after each kind. The fit is the start-up time and the bandwidth of configs/hardware (`collectives`): a line through the
times of the smallest and the largest sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402

SIZES = [2**exponent for exponent in range(12, 29, 2)]
"""Bytes of the whole tensor: 4 KiB to 256 MiB."""
CALLS, ROUNDS, WARM_UP = 20, 15, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind."""

    call: Callable[[Any], Callable[[], Any]]
    """Takes a tensor, returns what is measured."""
    capturing: Callable[[], AbstractContextManager[Any]]
    """Around the capture of a graph; makes the stream current that is captured."""
    bytes_sent: int
    """Of each GPU, over the share (n - 1) / n of the tensor's bytes."""


def main() -> int:
    """Measure every collective at every size; rank 0 writes the record."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--custom", action="store_true", help="also vLLM's own all-reduce; needs vLLM")
    options = parser.parse_args()
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(local)
    # A rank that fails must not leave the others waiting for ten minutes.
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    record: dict[str, Any] = {}
    if rank == 0:
        record = {
            **head("collectives over the GPUs of one machine by size, in us", options.commit),
            "environment": {**gpu_environment(), "gpus": size, "nccl": ".".join(map(str, nccl.version()))},
            "calls_in_a_graph": CALLS,
            "times": {},
            "fit": {},
        }
    kinds = _nccl(torch, dist, size)
    if options.custom:
        kinds["vllm_all_reduce"] = _vllm_all_reduce(rank, size, local)
    for name, kind in kinds.items():
        times: dict[str, Any] = {}
        for count in SIZES:
            tensor = torch.randn(count // 2, device="cuda", dtype=torch.bfloat16)
            samples = _measure(torch, dist, kind.call(tensor), kind.capturing)
            times[str(count)] = {"us": statistics.median(samples), "samples_us": samples}
        if rank == 0:
            record["times"][name] = times
            record["fit"][name] = fit(times, size, bytes_sent=kind.bytes_sent)
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")
            print(name, record["fit"][name], {count: found["us"] for count, found in times.items()}, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def fit(times: dict[str, Any], num_gpus: int, *, bytes_sent: int) -> dict[str, float]:
    """Return start-up time (us, median of sizes up to 64 KiB) and bandwidth (bytes/s, from 64 MiB on)."""
    small = [found["us"] for count, found in times.items() if int(count) <= 2**16]
    latency = statistics.median(small)
    rates = [
        bytes_sent * int(count) * (num_gpus - 1) / num_gpus / max(1e-9, found["us"] - latency) * 1e6
        for count, found in times.items()
        if int(count) >= 2**26
    ]
    return {"latency_us": latency, "bandwidth_bytes_per_s": statistics.median(rates)}


def _measure(
    torch: Any, dist: Any, call: Callable[[], Any], capturing: Callable[[], AbstractContextManager[Any]]
) -> list[float]:
    """Return the times of one call in us, of each round, on the slowest rank."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog asks for its events in a thread of its own meanwhile.
    with (
        capturing(),
        torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"),
    ):
        for _ in range(CALLS):
            call()
    samples: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([start.elapsed_time(end) * 1e3 / CALLS], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples.append(round(slowest.item(), 3))
    return samples[WARM_UP:]


def _nccl(torch: Any, dist: Any, size: int) -> dict[str, Collective]:
    def gather(tensor: Any) -> Callable[[], Any]:
        part = tensor[: tensor.numel() // size].clone()
        whole = torch.empty(part.numel() * size, device="cuda", dtype=tensor.dtype)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def scatter(tensor: Any) -> Callable[[], Any]:
        part = torch.empty(tensor.numel() // size, device="cuda", dtype=tensor.dtype)
        whole = tensor[: part.numel() * size]
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def other_stream() -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream())

    return {
        "all_reduce": Collective(
            call=lambda tensor: lambda: dist.all_reduce(tensor), capturing=other_stream, bytes_sent=2
        ),
        "all_gather": Collective(call=gather, capturing=other_stream, bytes_sent=1),
        "reduce_scatter": Collective(call=scatter, capturing=other_stream, bytes_sent=1),
    }


def _vllm_all_reduce(rank: int, size: int, local: int) -> Collective:
    """Return vLLM's all-reduce of a tensor parallel group; its graphs register the buffers that its kernel reads."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import get_tp_group

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, local_rank=local)
        initialize_model_parallel(size)
    group = get_tp_group()

    def call(tensor: Any) -> Callable[[], Any]:
        shaped = tensor.view(-1, min(2048, tensor.numel()))
        return lambda: group.all_reduce(shaped)

    return Collective(call=call, capturing=group.graph_capture, bytes_sent=2)


if __name__ == "__main__":
    sys.exit(main())
