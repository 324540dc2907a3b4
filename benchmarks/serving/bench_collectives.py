"""Measures the collectives of tensor, expert and data parallelism by size, as vLLM's layers call them.

    torchrun --nproc-per-node N benchmarks/serving/bench_collectives.py --out FILE [--custom] [--commit C]

NCCL all-reduce, all-gather and reduce-scatter of BF16, each replayed from a CUDA graph of CALLS calls; with --custom
also the all-reduce that vLLM uses inside its graphs (its communicator of a tensor parallel group: custom, symmetric
memory or NCCL, whichever it picks by size). Medians over rounds; the slowest rank counts. The fit is the start-up time
and the bandwidth of configs/hardware (`collectives`): a line through the times of the smallest and the largest sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import head, packages, parser_of  # noqa: E402

SIZES = [2**exponent for exponent in range(12, 29, 2)]
"""Bytes of the whole tensor: 4 KiB to 256 MiB."""
CALLS, ROUNDS, WARM_UP = 20, 15, 3


def main() -> int:
    """Measure every collective at every size; rank 0 writes the record."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--custom", action="store_true", help="also vLLM's own all-reduce; needs vLLM")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    kinds: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "all_reduce": lambda tensor: lambda: dist.all_reduce(tensor),
        "all_gather": lambda tensor: _gather(dist, torch, tensor, size),
        "reduce_scatter": lambda tensor: _scatter(dist, torch, tensor, size),
    }
    if options.custom:
        kinds["vllm_all_reduce"] = _vllm_all_reduce(rank, size)
    times: dict[str, dict[str, Any]] = {}
    for name, make in kinds.items():
        times[name] = {}
        for count in SIZES:
            tensor = torch.randn(count // 2, device="cuda", dtype=torch.bfloat16)
            samples = _measure(torch, dist, make(tensor))
            times[name][str(count)] = {"us": statistics.median(samples), "samples_us": samples}
    if rank == 0:
        record = {
            **head("collectives over the GPUs of one machine by size, in us", options.commit),
            "device": torch.cuda.get_device_name(),
            "num_gpus": size,
            "versions": {**packages("torch"), "nccl": ".".join(map(str, nccl.version()))},
            "calls_in_a_graph": CALLS,
            "times": times,
            "fit": {name: fit(found, size, halves=2 if "reduce" in name and "scatter" not in name else 1)
                    for name, found in times.items()},
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(record["fit"], indent=1))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def fit(times: dict[str, Any], num_gpus: int, *, halves: int) -> dict[str, float]:
    """Return start-up time (us, median of sizes up to 64 KiB) and bandwidth (bytes/s, from 64 MiB on)."""
    small = [found["us"] for count, found in times.items() if int(count) <= 2**16]
    latency = statistics.median(small)
    rates = [
        halves * int(count) * (num_gpus - 1) / num_gpus / max(1e-9, found["us"] - latency) * 1e6
        for count, found in times.items()
        if int(count) >= 2**26
    ]
    return {"latency_us": latency, "bandwidth_bytes_per_s": statistics.median(rates)}


def _measure(torch: Any, dist: Any, call: Callable[[], Any]) -> list[float]:
    """Return the times of one call in us, of each round, on the slowest rank."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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


def _gather(dist: Any, torch: Any, tensor: Any, size: int) -> Callable[[], Any]:
    part = tensor[: tensor.numel() // size].clone()
    whole = torch.empty(part.numel() * size, device="cuda", dtype=tensor.dtype)
    return lambda: dist.all_gather_into_tensor(whole, part)


def _scatter(dist: Any, torch: Any, tensor: Any, size: int) -> Callable[[], Any]:
    part = torch.empty(tensor.numel() // size, device="cuda", dtype=tensor.dtype)
    whole = tensor[: part.numel() * size]
    return lambda: dist.reduce_scatter_tensor(part, whole)


def _vllm_all_reduce(rank: int, size: int) -> Callable[[Any], Callable[[], Any]]:
    """Return what makes a call of vLLM's all-reduce; graphs register its buffers as vLLM does."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import get_tp_group

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, local_rank=rank)
        initialize_model_parallel(size)
    group = get_tp_group()

    def make(tensor: Any) -> Callable[[], Any]:
        shaped = tensor.view(-1, min(2048, tensor.numel()))
        return lambda: group.all_reduce(shaped)

    return make


if __name__ == "__main__":
    sys.exit(main())
