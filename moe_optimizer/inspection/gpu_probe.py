"""Reads the GPUs of this machine through NVML (no CUDA context, no torch)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_optimizer.inspection.hardware_catalog import CatalogEntry, catalog
from moe_optimizer.specs.hardware import GpuSpec, HardwareSpec
from moe_optimizer.specs.quantity import Quantity, Source

NO_GPU = HardwareSpec(
    origin="probed", gpu=None, num_gpus=0, cpu=None, driver_version=None, cuda_version=None, warnings=()
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Two cards of one model differ by what their error correction and firmware set aside, not by more.
_MEMORY_TOLERANCE = 0.10
_PCI_VENDOR_BITS = 16
# bytes/s of one PCIe lane in one direction, after line coding.
_PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
_MAX_NVLINKS = 18
# assumed: dense BF16 operations of one SM in one clock, by compute capability. Derived from datasheets as
# rate / (SMs * boost clock); FP8 is twice that from 8.9 on. An architecture that is not here gets no rates.
_BF16_PER_SM_CLOCK = {
    (8, 0): 2048, (8, 6): 512, (8, 7): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 1024,
}  # fmt: skip
_CORES_PER_SM = {(8, 0): 64}
_FP32_PER_CORE_CLOCK = 2


def probe_gpus() -> HardwareSpec:
    """Return the machine's visible GPUs, without its processor, as NVML knows them; of different ones the smallest.

    No driver means no GPU, without a warning; a broken one is told.
    """
    try:
        import pynvml
    except ImportError:
        return (
            _none("an NVIDIA driver is loaded, but nvidia-ml-py is not installed") if DRIVER_FILE.exists() else _none()
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not DRIVER_FILE.exists():
            return _none()
        return _none(f"an NVIDIA driver is loaded, but its management library fails ({error}): planning without GPU")
    try:
        return _probe(pynvml)
    except pynvml.NVMLError as error:
        return _none(f"the NVIDIA management library fails ({error}): planning without GPU")
    finally:
        pynvml.nvmlShutdown()


def _none(*warnings: str) -> HardwareSpec:
    return NO_GPU if not warnings else replace(NO_GPU, warnings=warnings)


def _probe(nvml: Any) -> HardwareSpec:
    warnings: list[str] = []
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    handles = _visible(nvml, handles, os.environ.get("CUDA_VISIBLE_DEVICES"), warnings)
    whole = [handle for handle in handles if not _mig_enabled(nvml, handle)]
    if len(whole) < len(handles):
        warnings.append(
            f"{len(handles) - len(whole)} GPUs are split by MIG and left out: a slice cannot be planned for; "
            "disable MIG (nvidia-smi -mig 0) or plan with --hardware"
        )
    specs = [_gpu_spec(nvml, handle, warnings) for handle in whole]
    gpu = min(specs, key=lambda spec: spec.memory.value, default=None)
    names = list(dict.fromkeys(spec.name for spec in specs))
    if gpu is not None and len(names) > 1:
        warnings.append(
            f"different GPUs ({', '.join(names)}): planned as {len(specs)} x the smallest, {gpu.name}; choose equal "
            "ones with CUDA_VISIBLE_DEVICES (and CUDA_DEVICE_ORDER=PCI_BUS_ID, so that its numbers are nvidia-smi's)"
        )
    if gpu is not None and len(whole) > 1:
        gpu = _with_actual_link(nvml, whole, gpu, warnings)
    cuda = _optional(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return replace(
        NO_GPU,
        gpu=gpu,
        num_gpus=len(specs),
        driver_version=_optional(nvml, nvml.nvmlSystemGetDriverVersion),
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _visible(nvml: Any, handles: list[Any], setting: str | None, warnings: list[str]) -> list[Any]:
    """Return the handles that CUDA would show: CUDA stops at the first entry that names no device."""
    if setting is None:
        return handles
    chosen: list[Any] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(handles):
            match = handles[int(entry)]
        else:
            uuids = [str(_optional(nvml, nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
            named = [handles[i] for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
            match = named[0] if len(named) == 1 else None
        if match is None:
            # "" and "-1" are the usual ways to hide all GPUs.
            if entry not in ("", "-1"):
                warnings.append(
                    f"CUDA_VISIBLE_DEVICES={setting}: {entry!r} names no whole GPU; CUDA ignores it and the rest"
                )
            break
        if match not in chosen:
            chosen.append(match)
    return chosen


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    mode = _optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return bool(mode and mode[0])


def _gpu_spec(nvml: Any, handle: Any, warnings: list[str]) -> GpuSpec:
    name = str(nvml.nvmlDeviceGetName(handle))
    memory = Quantity(float(nvml.nvmlDeviceGetMemoryInfo(handle).total), "bytes", Source.MEASURED, "NVML total memory")
    entry = _catalog_match(nvml, handle, name, memory.value)
    if entry is not None:
        return replace(entry.gpu, name=name, memory=memory)
    warnings.append(
        f"{name} is not in configs/hardware: its rates are assumed from clocks and unit counts, so expected gains "
        "are rough; add a file for it"
    )
    return _unknown_gpu(nvml, handle, name, memory)


def _catalog_match(nvml: Any, handle: Any, name: str, memory_bytes: float) -> CatalogEntry | None:
    pci = _optional(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    device_id = f"0x{pci.pciDeviceId >> _PCI_VENDOR_BITS:04x}" if pci is not None else ""
    candidates = [entry for entry in catalog() if name in entry.nvml_names]
    candidates += [entry for entry in catalog() if device_id in entry.pci_device_ids]
    for entry in candidates:
        # A virtual GPU keeps the name or the id, but has a slice of the memory.
        if abs(memory_bytes / entry.gpu.memory.value - 1) <= _MEMORY_TOLERANCE:
            return entry
    return None


def _unknown_gpu(nvml: Any, handle: Any, name: str, memory: Quantity) -> GpuSpec:
    capability = _optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0)
    major, minor = int(capability[0]), int(capability[1])
    cores = _optional(nvml, nvml.nvmlDeviceGetNumGpuCores, handle) or 0
    sm_count = cores // _CORES_PER_SM.get((major, minor), 128)
    bus_bits = _optional(nvml, nvml.nvmlDeviceGetMemoryBusWidth, handle) or 0
    memory_mhz = _optional(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM) or 0
    sm_mhz = _optional(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM) or 0
    return GpuSpec(
        key="unknown",
        name=name,
        compute_capability=(major, minor),
        memory=memory,
        # Two transfers a clock: every memory that NVML reports the clock of this way.
        memory_bandwidth=_assumed(bus_bits / 8 * memory_mhz * 1e6 * 2, "bytes/s", "NVML bus width x memory clock x 2"),
        dense_flops=_assumed_flops((major, minor), cores=cores, sm_count=sm_count, clock_hz=sm_mhz * 1e6),
        gpu_link_bandwidth=_pcie_bandwidth(nvml, handle),
        gpu_link="pcie",
        sm_count=sm_count,
        max_gpus_per_node=max(1, int(nvml.nvmlDeviceGetCount())),
    )


def _assumed_flops(capability: tuple[int, int], *, cores: int, sm_count: int, clock_hz: float) -> dict[str, Quantity]:
    flops = {"fp32": _assumed(cores * clock_hz * _FP32_PER_CORE_CLOCK, "flop/s", "cores x clock x 2")}
    per_clock = _BF16_PER_SM_CLOCK.get(capability)
    if per_clock:
        ref = f"SMs x clock x {per_clock} per clock on compute capability {capability[0]}.{capability[1]}"
        rate = sm_count * clock_hz * per_clock
        flops["bf16"] = flops["fp16"] = _assumed(rate, "flop/s", ref)
        if capability >= (8, 9):
            flops["fp8"] = _assumed(2 * rate, "flop/s", f"twice BF16: {ref}")
    return flops


def _with_actual_link(nvml: Any, handles: list[Any], gpu: GpuSpec, warnings: list[str]) -> GpuSpec:
    """Replace NVLink by PCIe where the catalog's model has NVLink but these cards are not joined by it."""
    if gpu.gpu_link != "nvlink" or all(_has_active_nvlink(nvml, handle) for handle in handles):
        return gpu
    warnings.append(f"{gpu.name}: no active NVLink between the GPUs; planned with PCIe between them")
    pcie = _pcie_bandwidth(nvml, handles[0])
    # The constants of the file are those of NVLink.
    return replace(gpu, gpu_link="pcie", gpu_link_bandwidth=pcie, collectives={})


def _has_active_nvlink(nvml: Any, handle: Any) -> bool:
    return any(_optional(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_NVLINKS))


def _pcie_bandwidth(nvml: Any, handle: Any) -> Quantity:
    generation = _optional(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 4
    lanes = _optional(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 16
    lane = _PCIE_LANE.get(generation, _PCIE_LANE[4])
    return _assumed(lane * lanes, "bytes/s", f"PCIe Gen{generation} x{lanes}, one direction")


def _assumed(value: float, unit: str, ref: str) -> Quantity:
    return Quantity(value, unit, Source.ASSUMED, ref)


def _optional(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Return what NVML says, or None where this driver or GPU does not support the question."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
