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
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.measure.links.collectives import (  # noqa: E402
    CALLS,
    SIZES,
    plain_collectives,
    sample_us,
    vllm_all_reduce,
)


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
    kinds = plain_collectives(size, "cuda")
    if options.custom:
        kinds["vllm_all_reduce"] = vllm_all_reduce(rank, size, local)
    for name, kind in kinds.items():
        times: dict[str, Any] = {}
        for count in SIZES:
            samples = sample_us(kind, count, "cuda")
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


if __name__ == "__main__":
    sys.exit(main())
