"""Holds what a machine is: accelerators, processor and memory, each number with unit and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_optimizer.specs.quantity import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One accelerator model. The facts come from configs/hardware/<key>.yaml; a probe overrides what it can read."""

    key: str
    """File name in configs/hardware without the ending, for example "h100_sxm"."""
    name: str
    """The vendor's name, for example "NVIDIA H100 80GB HBM3"."""
    compute_capability: tuple[int, int]
    memory: Quantity
    """Usable device memory in bytes (what the driver reports as total)."""
    memory_bandwidth: Quantity
    """bytes/s"""
    dense_flops: Mapping[str, Quantity]
    """flop/s without sparsity, by dtype: "fp32", "bf16", "fp8", ... A dtype that is absent is not supported."""
    gpu_link_bandwidth: Quantity
    """bytes/s that one GPU can send to its peers (one direction)."""
    gpu_link: Literal["nvlink", "pcie"]
    sm_count: int
    max_gpus_per_node: int
    nominal_memory: Quantity | None = None
    """What the vendor sells it as, in bytes; None when only the driver was asked."""
    measured: Mapping[str, Quantity] = field(default_factory=dict)
    """Rates seen on the hardware beside the datasheet's: "copy_bandwidth" (bytes/s), "bf16_flops" (flop/s).
    Empty when nobody measured."""
    collectives: Mapping[str, Quantity] = field(default_factory=dict)
    """Constants of collectives by size: "all_reduce_latency", "gather_latency", "network_latency" (us),
    "all_reduce_bandwidth", "gather_bandwidth", "network_bandwidth" (bytes/s of one GPU). Empty when not known."""

    def supports(self, dtype: str) -> bool:
        """Whether the matrix units take this dtype."""
        return dtype in self.dense_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpec:
    """The host processor."""

    name: str
    cores: int
    """Cores this process may use (affinity and cgroup quota respected)."""
    core_ids: tuple[int, ...]
    """The operating system's numbers of as many cores as `cores`, ascending: a worker bound to a core outside the
    process's affinity does not start."""
    memory: Quantity
    """bytes this process may use (cgroup limit respected)."""
    isa: tuple[str, ...]
    """Instruction sets that our kernels choose between: "avx2", "avx512f", "avx512_bf16", "amx_bf16", ..."""
    node_memory: Quantity | None = None
    """bytes of the NUMA node of the first usable core (cgroup limit respected): what vLLM's CPU build takes its
    share of, for each worker. None where the system does not say; then it is `memory`."""
    physical_cores: tuple[tuple[int, ...], ...] = ()
    """For each NUMA node one number of each of its physical cores, as vLLM's CPU build binds workers to them: of two
    hardware threads the last. Empty where the system does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """The machine that is planned for."""

    origin: Literal["probed", "named"]
    gpu: GpuSpec | None
    """The GPU model; None on a machine without one. Mixed machines are planned for their smallest GPU."""
    num_gpus: int
    """GPUs on the machine (probed) or assumed available (named); 0 without GPU."""
    cpu: CpuSpec | None
    """None for a named machine: nothing is known about its host."""
    driver_version: str | None
    cuda_version: str | None
    warnings: tuple[str, ...]
