"""The GPUs this package knows, a file of configs/hardware for each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.hardware_file import CatalogEntry, read_hardware_file
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.resources import config_dir
from moe_optimizer.specs.hardware import HardwareSpec

CPU_NAME = "cpu"
"""The name that means: this machine without its GPUs."""


def hardware_names() -> tuple[str, ...]:
    """Return the names that `load_hardware` takes, sorted, "cpu" last."""
    return (*sorted(path.stem for path in _folder().glob("*.yaml")), CPU_NAME)


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
        # Late: the probe reads this catalog, and a named GPU needs no look at this machine.
        from moe_optimizer.inspection.hardware_probe import probe_hardware

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


def load_catalog_entry(name: str) -> CatalogEntry:
    """Return one GPU's facts.

    Raises:
        InputError: unknown name, or a broken facts file.
    """
    known = hardware_names()
    if name not in known or name == CPU_NAME:
        wanted = name.lower().replace("-", "_")
        # "h100" is nearer to h200 than to h100_sxm by letters, but means one of its own kind.
        kinds = [key for key in known if key.startswith(f"{wanted}_")]
        hint = f"did you mean {' or '.join(kinds)}?" if kinds else did_you_mean(wanted, known)
        raise InputError(
            f"unknown hardware {name!r:.80}, expected one of {', '.join(known)}",
            hint=hint or "add configs/hardware/<name>.yaml for another GPU",
        )
    return read_hardware_file(_folder() / f"{name}.yaml")


@cache
def catalog() -> tuple[CatalogEntry, ...]:
    """Return all entries, sorted by key."""
    return tuple(load_catalog_entry(name) for name in hardware_names() if name != CPU_NAME)


def _folder() -> Path:
    return config_dir() / "hardware"
