"""Reads the machine this process runs on, or a machine by its name."""

from __future__ import annotations

import dataclasses

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.cpu_probe import probe_cpu
from moe_optimizer.inspection.gpu_probe import NO_GPU, probe_gpus
from moe_optimizer.inspection.hardware_catalog import CPU_NAME, load_catalog_entry
from moe_optimizer.specs.hardware import HardwareSpec


def probe_hardware(*, without_gpus: bool = False) -> HardwareSpec:
    """Return what is here, as far as CUDA_VISIBLE_DEVICES, affinity and cgroups show it to this process.

    Never raises for hardware: what cannot be read is left out, and `warnings` says so where that is odd.

    Args:
        without_gpus: do not look for GPUs (the "cpu" machine).
    """
    return dataclasses.replace(NO_GPU if without_gpus else probe_gpus(), cpu=probe_cpu())


def load_hardware(name: str, num_gpus: int | None = None) -> HardwareSpec:
    """Return the machine called `name`, whether it is here or not.

    Args:
        name: one of `hardware_names()`. "cpu" is this machine without its GPUs.
        num_gpus: GPUs to assume; None: a full node of that GPU (`GpuSpec.max_gpus_per_node`).

    Raises:
        InputError: unknown name, a GPU count below 1, GPUs asked of "cpu", or a broken facts file.
    """
    if name == CPU_NAME:
        if num_gpus:
            raise InputError(f"hardware cpu: got {num_gpus} GPUs, expected none", hint="name a GPU or leave out --gpus")
        return probe_hardware(without_gpus=True)
    if num_gpus is not None and num_gpus < 1:
        raise InputError(f"hardware {name}: got {num_gpus} GPUs, expected at least 1", hint="--hardware cpu has none")
    gpu = load_catalog_entry(name).gpu
    num_gpus = gpu.max_gpus_per_node if num_gpus is None else num_gpus
    return dataclasses.replace(NO_GPU, origin="named", gpu=gpu, num_gpus=num_gpus)
