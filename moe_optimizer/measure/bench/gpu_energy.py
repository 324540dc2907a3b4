"""Reads the energy that the GPUs of this machine have used."""

from __future__ import annotations


def energy_joules() -> float | None:
    """Return the joules that all GPUs have used since their driver was loaded; None without such counters."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000 if handles else None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
