"""Finds the GPUs this package knows and reads their files of facts, configs/hardware/<key>.yaml, strictly.

Each fact is a mapping of value, unit, source and ref. An unknown, missing or ill-typed key is an error that
names file and line: a misspelt fact would otherwise be absent in silence, and every estimate with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.resources import config_dir
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.quantity import Quantity, Source
from moe_optimizer.yaml_model import Section, read_section

_Text = Annotated[str, Field(min_length=1)]
_Number = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]
_Version = Annotated[int, Field(ge=0)]
_Value = TypeVar("_Value")
_Unit = TypeVar("_Unit", bound=str)


class _Fact(Section, Generic[_Value, _Unit]):
    value: _Value
    unit: _Unit
    source: Source
    ref: _Text

    @property
    def quantity(self) -> Quantity:
        assert isinstance(self.value, (int, float)), self
        return Quantity(float(self.value), self.unit, self.source, self.ref)


_Bytes = _Fact[_Number, Literal["bytes"]]
_BytesRate = _Fact[_Number, Literal["bytes/s"]]
_FlopRate = _Fact[_Number, Literal["flop/s"]]
_Time = _Fact[_Number, Literal["us"]]


class _Rates(Section):
    def quantities(self) -> dict[str, Quantity]:
        return {name: fact.quantity for name, fact in self if fact is not None}


class _DenseFlops(_Rates):
    fp32: _FlopRate | None = None
    bf16: _FlopRate | None = None
    fp16: _FlopRate | None = None
    fp8: _FlopRate | None = None
    fp4: _FlopRate | None = None
    int8: _FlopRate | None = None


class _Measured(_Rates):
    copy_bandwidth: _BytesRate | None = None
    bf16_flops: _FlopRate | None = None
    fp8_flops: _FlopRate | None = None


class _Collectives(_Rates):
    """A small collective takes its latency; a large one moves bytes at the bandwidth. Network: between machines."""

    all_reduce_latency: _Time | None = None
    all_reduce_bandwidth: _BytesRate | None = None
    gather_latency: _Time | None = None
    gather_bandwidth: _BytesRate | None = None
    network_latency: _Time | None = None
    network_bandwidth: _BytesRate | None = None


class _GpuFacts(Section):
    name: _Text
    nvml_names: tuple[_Text, ...]
    pci_device_ids: tuple[_Text, ...]
    compute_capability: _Fact[tuple[_Version, _Version], Literal["major.minor"]]
    sm_count: _Fact[_Count, Literal["SMs"]]
    max_gpus_per_node: _Fact[_Count, Literal["GPUs"]]
    gpu_link: Literal["nvlink", "pcie"]
    gpu_link_bandwidth: _BytesRate
    memory: _Bytes
    nominal_memory: _Bytes
    memory_bandwidth: _BytesRate
    dense_flops: _DenseFlops
    measured: _Measured = _Measured()
    collectives: _Collectives = _Collectives()


CPU_NAME = "cpu"
"""The name that means: this machine without its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One file of the catalog: the facts, and how the driver names this GPU."""

    gpu: GpuSpec
    nvml_names: tuple[str, ...]
    """Names that NVML reports for it."""
    pci_device_ids: tuple[str, ...]
    """PCI device ids of NVIDIA (vendor 0x10de), for example "0x2330"."""


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


def read_hardware_file(path: Path) -> CatalogEntry:
    """Read one facts file; its stem becomes the GPU's key.

    Raises:
        InputError: unreadable, not YAML, or a key that is unknown, missing, given twice or of the wrong type or
            unit; the message names file and line.
    """
    facts = read_section(_GpuFacts, path, origin=str(path), what="hardware")
    gpu = GpuSpec(
        key=path.stem,
        name=facts.name,
        compute_capability=facts.compute_capability.value,
        memory=facts.memory.quantity,
        memory_bandwidth=facts.memory_bandwidth.quantity,
        dense_flops=facts.dense_flops.quantities(),
        gpu_link_bandwidth=facts.gpu_link_bandwidth.quantity,
        gpu_link=facts.gpu_link,
        sm_count=facts.sm_count.value,
        max_gpus_per_node=facts.max_gpus_per_node.value,
        nominal_memory=facts.nominal_memory.quantity,
        measured=facts.measured.quantities(),
        collectives=facts.collectives.quantities(),
    )
    return CatalogEntry(gpu=gpu, nvml_names=facts.nvml_names, pci_device_ids=facts.pci_device_ids)
