"""Computes the least time of the all-reduce that tensor parallelism adds to each layer."""

from __future__ import annotations

from moe_optimizer.costs.estimate import derived, divide
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.quantity import Quantity, Source

# assumed: one small collective inside a CUDA graph, launch and hand-over included. vLLM's custom all-reduce
# over NVLink is of this order; over PCIe it is not used and NCCL takes longer.
_LATENCY_US = {"nvlink": 8.0, "pcie": 25.0}


def all_reduce_us(num_bytes: float, gpu: GpuSpec, num_gpus: int) -> Quantity:
    """Return the time of one all-reduce of `num_bytes` on each of `num_gpus`, in us; 0 for one GPU.

    latency + 2 (n - 1) / n * bytes / one-way link bandwidth (reduce-scatter and all-gather).
    """
    if num_gpus < 1:
        raise ValueError(f"all-reduce: got {num_gpus} GPUs, expected at least 1")
    if num_gpus == 1:
        return Quantity(0.0, "us", Source.MODELLED, "all-reduce on one GPU moves nothing")
    latency = Quantity(
        _LATENCY_US[gpu.gpu_link],
        "us",
        Source.ASSUMED,
        f"{_LATENCY_US[gpu.gpu_link]:g} us to start over {gpu.gpu_link}",
    )
    crossing = 2 * num_bytes * (num_gpus - 1) / num_gpus
    transfer = divide(
        crossing * 1e6, gpu.gpu_link_bandwidth, unit="us", ref=f"{crossing:.4g} bytes per GPU / link bandwidth"
    )
    ref = f"all-reduce over {num_gpus} GPUs"
    return derived(latency.value + transfer.value, unit="us", ref=ref, inputs=(latency, transfer))
