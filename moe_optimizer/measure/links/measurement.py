"""Measures the links of a machine: a process of its own, see `measure.process`, with one process for each device."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from moe_optimizer.inspection.links import link_versions
from moe_optimizer.measure.links.collectives import SIZES, plain_collectives, sample_us, vllm_all_reduce
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.specs.links import LinkTimes

MOST_BYTES = {"cuda": SIZES[-1], "cpu": 2**22}
"""Of a tensor that is timed."""
_TIMEOUT = timedelta(seconds=60)
"""Chosen: a rank that fails must not leave the others waiting for ten minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRequest:
    """What to measure."""

    device: str
    """"cuda" or "cpu"."""
    name: str
    """Of one device."""
    groups: tuple[int, ...]
    """Numbers of devices."""
    most_bytes: int
    """Of the largest tensor."""


def _measure(request: LinkRequest, on_step: OnStep) -> tuple[LinkTimes, ...]:
    tables: list[LinkTimes] = []
    for size in request.groups:
        tables.append(_table(request, size))
        on_step(len(tables) / len(request.groups), f"{size} devices")
    return tuple(tables)


def _table(request: LinkRequest, size: int) -> LinkTimes:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="moe-optimizer-links-") as folder:
        spawn(_rank, args=(size, request.device, request.most_bytes, folder), nprocs=size)
        times = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
    by_size = {kind: {int(count): us for count, us in found.items()} for kind, found in times.items()}
    gathers, scatters = by_size["all_gather"], by_size["reduce_scatter"]
    return LinkTimes(
        device=request.name,
        num_devices=size,
        versions=link_versions(),
        all_reduce_us=by_size["all_reduce"],
        gather_us={count: statistics.mean((gathers[count], scatters[count])) for count in gathers},
        source=f"measured here on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _rank(rank: int, size: int, device: str, most_bytes: int, folder: str) -> None:
    """Time every collective at every size; rank 0 writes the medians."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=_TIMEOUT,
    )  # fmt: skip
    kinds = plain_collectives(size, device)
    if device == "cuda":
        # Servers reduce with vLLM's own, which is several times as fast as NCCL on small tensors.
        kinds["all_reduce"] = vllm_all_reduce(rank, size, rank)
    sizes = [each for each in SIZES if each <= most_bytes]
    times = {
        name: {count: statistics.median(sample_us(kind, count, device)) for count in sizes}
        for name, kind in kinds.items()
    }
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(answer_request(LinkRequest, sys.argv[1:], _measure))
