"""Finds the GPUs this package knows, a file of configs/hardware for each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.hardware_file import CatalogEntry, read_hardware_file
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.resources import config_dir

CPU_NAME = "cpu"
"""The name that means: this machine without its GPUs."""


def hardware_names() -> tuple[str, ...]:
    """Return the names that `load_hardware` takes, sorted, "cpu" last."""
    return (*sorted(path.stem for path in _folder().glob("*.yaml")), CPU_NAME)


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
