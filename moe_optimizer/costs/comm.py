"""The least time of the collectives that tensor and expert parallelism add to each layer."""

from __future__ import annotations

from moe_optimizer.costs.estimate import add, divide
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.quantity import Quantity, Source

# assumed: one small collective inside a CUDA graph, launch and hand-over included. vLLM's custom all-reduce
# over NVLink is of this order; over PCIe it is not used and NCCL takes longer.
_LATENCY_US = {"nvlink": 8.0, "pcie": 25.0}


def all_reduce_us(num_bytes: float, gpu: GpuSpec, num_gpus: int) -> Quantity:
    """Return the time of one all-reduce of `num_bytes` on each of `num_gpus`, in us; 0 for one GPU.

    latency + 2 (n - 1) / n * bytes / one-way link bandwidth (reduce-scatter and all-gather).
    """
    return _collective("all-reduce", num_bytes * 2, gpu, num_gpus)


def all_gather_us(num_bytes: float, gpu: GpuSpec, num_gpus: int) -> Quantity:
    """Return the time until each of `num_gpus` has all of `num_bytes`, each holding 1/n before, in us.

    latency + (n - 1) / n * bytes / one-way link bandwidth. A reduce-scatter takes the same.
    """
    return _collective("all-gather", num_bytes, gpu, num_gpus)


def all_to_all_us(num_bytes: float, gpu: GpuSpec, num_gpus: int) -> Quantity:
    """Return the time of one all-to-all in which each GPU holds `num_bytes`, in us; 0 for one GPU.

    latency + (n - 1) / n * bytes / one-way link bandwidth: 1/n of the bytes stays where it is.
    """
    return _collective("all-to-all", num_bytes, gpu, num_gpus)


def _collective(name: str, moved_bytes: float, gpu: GpuSpec, num_gpus: int) -> Quantity:
    if num_gpus < 1:
        raise ValueError(f"{name}: got {num_gpus} GPUs, expected at least 1")
    if num_gpus == 1:
        return Quantity(0.0, "us", Source.MODELLED, f"{name} on one GPU moves nothing")
    latency = Quantity(
        _LATENCY_US[gpu.gpu_link],
        "us",
        Source.ASSUMED,
        f"{_LATENCY_US[gpu.gpu_link]:g} us to start over {gpu.gpu_link}",
    )
    crossing = moved_bytes * (num_gpus - 1) / num_gpus
    transfer = divide(
        crossing * 1e6, gpu.gpu_link_bandwidth, unit="us", ref=f"{crossing:.4g} bytes per GPU / link bandwidth"
    )
    return add((latency, transfer), ref=f"{name} over {num_gpus} GPUs")
