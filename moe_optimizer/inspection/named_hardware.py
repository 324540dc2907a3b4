"""Machines by name, whether they are here or not."""

from __future__ import annotations

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.hardware_catalog import CPU_NAME, load_catalog_entry
from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.specs.hardware import HardwareSpec


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
    return HardwareSpec(
        origin="named",
        gpu=gpu,
        num_gpus=gpu.max_gpus_per_node if num_gpus is None else num_gpus,
        cpu=None,
        driver_version=None,
        cuda_version=None,
        warnings=(),
    )
