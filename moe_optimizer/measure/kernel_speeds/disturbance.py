"""Notices what else uses the device while kernels are measured: then their times say little."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence

_BUSY_PERCENT = 10
"""Chosen: a GPU that nobody uses shows 0; one that draws a desktop a few."""
_CPU_BUSY_PERCENT = 25
"""Chosen: of the cores to measure on; what a quiet machine does by itself is less."""
_MAX_SPREAD = 0.1
"""Chosen: quartiles of a quiet GPU lie 1 to 2 % of the median apart, of a quiet processor up to 5 %."""
_LOOKS, PAUSE_S = 5, 0.1


def busy_before(device: str, cores: Sequence[int] = ()) -> str:
    """Return how busy others keep the device, before anything is measured on it; "" where it is quiet or cannot be
    asked.
    """
    percent, limit, what = (
        (_gpu_percent(), _BUSY_PERCENT, "the GPU")
        if device == "cuda"
        else (_cpu_percent(cores), _CPU_BUSY_PERCENT, "the processor")
    )
    return f"{what} was {percent:.0f} % busy with something else" if percent >= limit else ""


def unsteady(spreads: Sequence[float]) -> str:
    """Return how far times of one kernel lay apart; "" where that is little."""
    spread = statistics.median(spreads) if spreads else 0.0
    return f"the times of one kernel lay {spread:.0%} apart" if spread > _MAX_SPREAD else ""


def _gpu_percent() -> float:
    try:
        import pynvml
    except ImportError:
        return 0.0
    with contextlib.suppress(pynvml.NVMLError, ValueError):
        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
        if first.isdecimal():
            gpu = pynvml.nvmlDeviceGetHandleByIndex(int(first))
        else:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(first)
        looks = []
        for _ in range(_LOOKS):
            looks.append(float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu))
            time.sleep(PAUSE_S)
        return statistics.median(looks)
    return 0.0


def _cpu_percent(cores: Sequence[int]) -> float:
    import psutil

    busy = psutil.cpu_percent(interval=_LOOKS * PAUSE_S, percpu=True)
    return statistics.mean(busy[core] for core in cores if core < len(busy)) if cores else 0.0
