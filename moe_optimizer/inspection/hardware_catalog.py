"""Finds the GPUs this package knows and reads their files of facts, configs/hardware/<key>.yaml, strictly.

Each fact is a mapping of value, unit, source and ref. An unknown, missing or ill-typed key is an error that
names file and line: a misspelt fact would otherwise be absent in silence, and every estimate with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moe_optimizer.errors import InputError
from moe_optimizer.near_match import did_you_mean
from moe_optimizer.resources import config_dir
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.quantity import Quantity, Source
from moe_optimizer.yaml_document import YamlDocument, read_yaml

_QUANTITY_KEYS = ("value", "unit", "source", "ref")
_UNITS = {
    "compute_capability": "major.minor",
    "sm_count": "SMs",
    "max_gpus_per_node": "GPUs",
    "gpu_link_bandwidth": "bytes/s",
    "memory": "bytes",
    "nominal_memory": "bytes",
    "memory_bandwidth": "bytes/s",
}
_DENSE_FLOPS_DTYPES = ("fp32", "bf16", "fp16", "fp8", "fp4", "int8")
_MEASURED_UNITS = {"copy_bandwidth": "bytes/s", "bf16_flops": "flop/s", "fp8_flops": "flop/s"}
_REQUIRED = ("name", "nvml_names", "pci_device_ids", *_UNITS, "gpu_link", "dense_flops")
_OPTIONAL = ("measured",)


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
    facts = _Facts.read(path)
    facts.check_keys((), required=_REQUIRED, optional=_OPTIONAL)
    facts.check_keys(("dense_flops",), required=(), optional=_DENSE_FLOPS_DTYPES)
    if "measured" in facts.document.data:
        facts.check_keys(("measured",), required=(), optional=tuple(_MEASURED_UNITS))
    quantities = {key: facts.quantity((key,), unit) for key, unit in _UNITS.items() if key != "compute_capability"}
    gpu = GpuSpec(
        key=path.stem,
        name=facts.text(("name",)),
        compute_capability=facts.compute_capability(),
        memory=quantities["memory"],
        memory_bandwidth=quantities["memory_bandwidth"],
        dense_flops={key: facts.quantity(("dense_flops", key), "flop/s") for key in facts.at(("dense_flops",))},
        gpu_link_bandwidth=quantities["gpu_link_bandwidth"],
        gpu_link=facts.gpu_link(),
        sm_count=facts.count(("sm_count",)),
        max_gpus_per_node=facts.count(("max_gpus_per_node",)),
        nominal_memory=quantities["nominal_memory"],
        measured={
            key: facts.quantity(("measured", key), _MEASURED_UNITS[key])
            for key in facts.document.data.get("measured", ())
        },
    )
    return CatalogEntry(
        gpu=gpu, nvml_names=facts.texts(("nvml_names",)), pci_device_ids=facts.texts(("pci_device_ids",))
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """A YAML mapping with the line of every key, for messages."""

    path: Path
    document: YamlDocument

    @staticmethod
    def read(path: Path) -> _Facts:
        document = read_yaml(path, origin=str(path), what="hardware")
        if not isinstance(document.data, dict):
            raise InputError(f"{path}: expected a mapping of hardware facts")
        return _Facts(path, document)

    def error(self, key: tuple[str, ...], problem: str, *, hint: str | None = None) -> InputError:
        name = f" ({'.'.join(key)})" if key else ""
        return InputError(f"{self.path}:{self.document.line(key)}{name}: {problem}", hint=hint)

    def at(self, key: tuple[str, ...]) -> Any:
        value: Any = self.document.data
        for part in key:
            value = value[part]
        return value

    def check_keys(self, group: tuple[str, ...], *, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
        value = self.at(group)
        if not isinstance(value, dict):
            raise self.error(group, f"got {value!r:.80}, expected a mapping")
        allowed = (*required, *optional)
        for key in value:
            if key not in allowed:
                raise self.error(
                    (*group, str(key)),
                    f"unknown key {key!r}, expected one of {', '.join(allowed)}",
                    hint=did_you_mean(str(key), allowed),
                )
        for key in required:
            if key not in value:
                raise self.error((*group, key), f"key {key!r} is missing")

    def quantity(self, key: tuple[str, ...], unit: str) -> Quantity:
        self.check_keys(key, required=_QUANTITY_KEYS, optional=())
        fact = self.at(key)
        value = fact["value"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            hint = "write 4.8e+12, with the sign: YAML reads 4.8e12 as text" if isinstance(value, str) else None
            raise self.error((*key, "value"), f"got {value!r}, expected a positive number", hint=hint)
        if fact["unit"] != unit:
            raise self.error((*key, "unit"), f"got {fact['unit']!r}, expected {unit!r}")
        return Quantity(float(value), unit, self._source(key), self.text((*key, "ref")))

    def count(self, key: tuple[str, ...]) -> int:
        value = self.at(key)["value"]
        if not isinstance(value, int):
            raise self.error((*key, "value"), f"got {value!r}, expected a whole number")
        return value

    def compute_capability(self) -> tuple[int, int]:
        key = ("compute_capability",)
        self.check_keys(key, required=_QUANTITY_KEYS, optional=())
        value = self.at(key)["value"]
        numbers = isinstance(value, list) and [part for part in value if type(part) is int and part >= 0]
        if not numbers or len(numbers) != 2 or len(value) != 2:
            raise self.error((*key, "value"), f"got {value!r}, expected two whole numbers such as [9, 0]")
        self._source(key)
        return numbers[0], numbers[1]

    def gpu_link(self) -> Literal["nvlink", "pcie"]:
        value = self.at(("gpu_link",))
        if value not in ("nvlink", "pcie"):
            raise self.error(("gpu_link",), f"got {value!r}, expected nvlink or pcie")
        return value

    def text(self, key: tuple[str, ...]) -> str:
        value = self.at(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"got {value!r:.80}, expected text")
        return value

    def texts(self, key: tuple[str, ...]) -> tuple[str, ...]:
        value = self.at(key)
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.error(key, f"got {value!r:.80}, expected a list of texts")
        return tuple(value)

    def _source(self, key: tuple[str, ...]) -> Source:
        value = self.at(key)["source"]
        try:
            return Source(value)
        except ValueError:
            expected = ", ".join(source.value for source in Source)
            raise self.error((*key, "source"), f"got {value!r}, expected one of {expected}") from None
