"""What counts as a busy device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from moe_optimizer.measure.kernel_speeds import disturbance
from moe_optimizer.measure.kernel_speeds.disturbance import busy_before, unsteady


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for NVML with a GPU that is as busy as its field says."""
    asked: list[Any] = []
    fake = SimpleNamespace(
        NVMLError=NVMLError, percent=0, asked=asked, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=asked.append, nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=fake.percent),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(disturbance, "PAUSE_S", 0.0)
    return fake


@pytest.mark.parametrize(("percent", "said"), [(0, ""), (9, ""), (43, " 43 % busy")])
def test_a_busy_gpu_is_said(nvml: Any, percent: int, said: str) -> None:
    nvml.percent = percent
    assert bool(busy_before("cuda")) == bool(said)
    assert said in busy_before("cuda")


@pytest.mark.parametrize(("visible", "asked"), [("", 0), ("3,1", 3), ("GPU-abc", "GPU-abc")])
def test_the_gpu_that_is_measured_is_asked(
    nvml: Any, monkeypatch: pytest.MonkeyPatch, visible: str, asked: int | str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    busy_before("cuda")
    assert nvml.asked == [asked]


def test_a_gpu_that_cannot_be_asked_counts_as_quiet(nvml: Any) -> None:
    def fail() -> None:
        raise NVMLError

    nvml.nvmlInit = fail
    assert busy_before("cuda") == ""


def test_only_the_cores_that_are_measured_on_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [100.0, 5.0, 0.0])
    assert busy_before("cpu", (1, 2)) == ""
    assert " 100 % busy" in busy_before("cpu", (0,))


def test_times_far_apart_are_said() -> None:
    assert unsteady([0.01, 0.02, 0.5]) == ""
    assert "30%" in unsteady([0.01, 0.3, 0.5])
    assert unsteady([]) == ""
