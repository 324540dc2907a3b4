"""Reads what the driver counts of this machine's GPUs: energy, and the memory of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any


def energy_joules() -> float | None:
    """Return the joules that all GPUs have used since their driver was loaded; None without such counters."""
    return _over_gpus(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000)


def memory_bytes(pids: Collection[int]) -> float | None:
    """Return the GPU memory of some processes; None without a GPU, or where its driver does not see processes."""

    def used(nvml: Any, gpu: Any) -> float:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        return sum(int(each.usedGpuMemory or 0) for each in processes if each.pid in pids)

    return _over_gpus(used)


def _over_gpus(read: Callable[[Any, Any], float]) -> float | None:
    """Return the sum of a counter over all GPUs; None where it is 0 or cannot be read."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return sum(read(pynvml, gpu) for gpu in gpus) or None
        finally:
            pynvml.nvmlShutdown()
    return None
