"""The machine this process runs on: GPUs through NVML, processor and memory through /proc and cgroups."""

from __future__ import annotations

from moe_optimizer.inspection.cpu_probe import probe_cpu
from moe_optimizer.inspection.gpu_probe import probe_gpus
from moe_optimizer.specs.hardware import HardwareSpec


def probe_hardware(*, without_gpus: bool = False) -> HardwareSpec:
    """Return what is here, as far as CUDA_VISIBLE_DEVICES, affinity and cgroups show it to this process.

    Never raises for hardware: what cannot be read is left out, and `warnings` says so where that is odd.

    Args:
        without_gpus: do not look for GPUs (the "cpu" machine).
    """
    if without_gpus:
        return HardwareSpec(
            origin="probed",
            gpu=None,
            num_gpus=0,
            cpu=probe_cpu(),
            driver_version=None,
            cuda_version=None,
            warnings=(),
        )
    found = probe_gpus()
    return HardwareSpec(
        origin="probed",
        gpu=found.gpu,
        num_gpus=found.num_gpus,
        cpu=probe_cpu(),
        driver_version=found.driver_version,
        cuda_version=found.cuda_version,
        warnings=found.warnings,
    )
