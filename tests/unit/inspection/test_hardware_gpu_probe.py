"""The probe against a fake NVML: no GPU is needed, and cards that nobody here has can be tried."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection import gpu_probe
from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.quantity import Source

MIB = 2**20


class FakeNVMLError(Exception):
    """Stands for pynvml.NVMLError."""


@dataclass
class FakeCard:
    """What one card answers; None: the question is not supported on it."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory_mib: int = 81559
    pci_device_id: int = 0x2330
    uuid: str = "GPU-11111111-aaaa"
    mig: int | None = 0
    nvlinks: int | None = 18
    compute_capability: tuple[int, int] = (9, 0)
    cores: int | None = 16896
    memory_bus_bits: int | None = 5120
    memory_mhz: int | None = 2619
    sm_mhz: int | None = 1980
    pcie_generation: int | None = 5
    pcie_lanes: int | None = 16


@dataclass
class FakeNvml:
    """Stands for the module pynvml."""

    cards: list[FakeCard] = field(default_factory=list)
    init_error: str | None = None
    count_error: str | None = None
    shutdowns: int = 0

    NVMLError = FakeNVMLError
    NVML_CLOCK_MEM = 2
    NVML_CLOCK_SM = 1

    def nvmlInit(self) -> None:
        if self.init_error:
            raise FakeNVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        if self.count_error:
            raise FakeNVMLError(self.count_error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        return types.SimpleNamespace(total=card.memory_mib * MIB)

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> Any:
        return types.SimpleNamespace(pciDeviceId=card.pci_device_id << 16 | 0x10DE)

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        return [_supported(card.mig), 0]

    def nvmlDeviceGetNvLinkState(self, card: FakeCard, link: int) -> int:
        return int(link < _supported(card.nvlinks))

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return card.compute_capability

    def nvmlDeviceGetNumGpuCores(self, card: FakeCard) -> int:
        return _supported(card.cores)

    def nvmlDeviceGetMemoryBusWidth(self, card: FakeCard) -> int:
        return _supported(card.memory_bus_bits)

    def nvmlDeviceGetMaxClockInfo(self, card: FakeCard, clock: int) -> int:
        return _supported(card.memory_mhz if clock == self.NVML_CLOCK_MEM else card.sm_mhz)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:
        return _supported(card.pcie_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:
        return _supported(card.pcie_lanes)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000


def _supported(answer: int | None) -> int:
    if answer is None:
        raise FakeNVMLError("Not Supported")
    return answer


H200 = FakeCard(name="NVIDIA H200", memory_mib=143771, pci_device_id=0x2335, uuid="GPU-22222222-bbbb")
A100_PCIE = FakeCard(name="NVIDIA A100-PCIE-40GB", memory_mib=40960, pci_device_id=0x20F1, nvlinks=None)
NEW_CARD = FakeCard(
    name="NVIDIA Future 9",
    memory_mib=65536,
    pci_device_id=0x9999,
    compute_capability=(8, 9),
    cores=12800,
    memory_bus_bits=384,
    memory_mhz=10000,
    sm_mhz=2000,
)


@pytest.fixture
def probe(monkeypatch):
    """Return probe_hardware with the fake in place of pynvml; the environment shows all GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def with_fake(
        *cards: FakeCard, visible: str | None = None, driver_loaded: bool = True, **fake: Any
    ) -> HardwareSpec:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(list(cards), **fake))
        monkeypatch.setattr(gpu_probe, "DRIVER_FILE", Path(__file__ if driver_loaded else "/nowhere"))
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return probe_hardware()

    return with_fake


def test_every_name_the_fake_answers_exists_in_pynvml():
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in (*vars(FakeNvml), *vars(FakeCard)) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_known_card_gets_the_catalogs_rates_and_its_own_memory(probe):
    hardware = probe(FakeCard(memory_mib=81000))
    assert hardware.gpu is not None
    assert (hardware.origin, hardware.gpu.key, hardware.num_gpus) == ("probed", "h100_sxm", 1)
    assert hardware.gpu.memory.value == 81000 * MIB
    assert hardware.gpu.memory.source is Source.MEASURED
    assert hardware.gpu.memory_bandwidth.value == 3.35e12
    assert (hardware.driver_version, hardware.cuda_version) == ("580.95.05", "13.0")
    assert hardware.warnings == ()


def test_card_with_another_name_is_known_by_its_pci_id(probe):
    hardware = probe(FakeCard(name="NVIDIA Graphics Device"))
    assert hardware.gpu is not None
    assert (hardware.gpu.key, hardware.gpu.name) == ("h100_sxm", "NVIDIA Graphics Device")


def test_a_slice_of_a_known_card_is_not_taken_for_the_card(probe):
    hardware = probe(FakeCard(memory_mib=20480))
    assert hardware.gpu is not None
    assert hardware.gpu.key == "unknown"


def test_unknown_card_gets_assumed_rates_and_a_warning(probe):
    hardware = probe(NEW_CARD)
    gpu = hardware.gpu
    assert gpu is not None
    assert (gpu.key, gpu.name, gpu.compute_capability, gpu.sm_count) == ("unknown", "NVIDIA Future 9", (8, 9), 100)
    assert gpu.memory_bandwidth.value == pytest.approx(384 / 8 * 10e9 * 2)
    assert gpu.dense_flops["bf16"].value == pytest.approx(100 * 2e9 * 1024)
    assert gpu.dense_flops["fp8"].value == 2 * gpu.dense_flops["bf16"].value
    assert {quantity.source for quantity in (gpu.memory_bandwidth, *gpu.dense_flops.values())} == {Source.ASSUMED}
    assert "NVIDIA Future 9 " in hardware.warnings[0]


def test_rates_assumed_from_clocks_come_near_the_datasheet_of_a_known_card(probe):
    gpu = probe(FakeCard(name="NVIDIA H100 in disguise", pci_device_id=0x9999, sm_mhz=1830)).gpu
    assert gpu.key == "unknown"
    assert gpu.memory_bandwidth.value == pytest.approx(3.35e12, rel=0.01)
    assert gpu.dense_flops["bf16"].value == pytest.approx(989.5e12, rel=0.01)


def test_architecture_nobody_described_gets_no_matrix_rates(probe):
    gpu = probe(FakeCard(name="NVIDIA Future 10", pci_device_id=0x9998, compute_capability=(13, 0))).gpu
    assert set(gpu.dense_flops) == {"fp32"}


def test_card_that_answers_nothing_optional_is_still_a_card(probe):
    silent = FakeCard(
        name="NVIDIA Silent",
        pci_device_id=0x9997,
        mig=None,
        nvlinks=None,
        cores=None,
        memory_bus_bits=None,
        memory_mhz=None,
        sm_mhz=None,
        pcie_generation=None,
        pcie_lanes=None,
    )
    hardware = probe(silent, silent)
    assert hardware.num_gpus == 2
    assert hardware.gpu is not None
    assert hardware.gpu.memory_bandwidth.value == 0


def test_different_cards_are_planned_for_the_smallest(probe):
    hardware = probe(H200, FakeCard())
    assert hardware.gpu is not None
    assert (hardware.gpu.key, hardware.num_gpus) == ("h100_sxm", 2)
    assert "(NVIDIA H200, NVIDIA " in hardware.warnings[0]
    assert "2 x the smallest" in hardware.warnings[0]


def test_cards_without_active_nvlink_are_planned_with_pcie(probe):
    hardware = probe(A100_PCIE, A100_PCIE)
    assert hardware.gpu is not None
    assert (hardware.gpu.key, hardware.gpu.gpu_link) == ("a100_40gb", "pcie")
    assert hardware.gpu.gpu_link_bandwidth.value == pytest.approx(16 * 3.938e9)
    assert "no active NVLink" in hardware.warnings[0]


def test_one_card_keeps_its_link_whatever_nvlink_says(probe):
    hardware = probe(A100_PCIE)
    assert hardware.gpu is not None
    assert (hardware.gpu.gpu_link, hardware.warnings) == ("nvlink", ())


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_cards_are_not_there(probe, visible):
    hardware = probe(FakeCard(), visible=visible)
    assert (hardware.gpu, hardware.num_gpus, hardware.warnings) == (None, 0, ())


@pytest.mark.parametrize(
    ("visible", "key", "count"),
    [
        ("1", "h200", 1),
        ("1,0", "h100_sxm", 2),
        ("GPU-2222", "h200", 1),
        ("0,0", "h100_sxm", 1),
        (" 0 , 1 ", "h100_sxm", 2),
    ],
)
def test_cuda_visible_devices_chooses_cards(probe, visible, key, count):
    hardware = probe(FakeCard(), H200, visible=visible)
    assert hardware.gpu is not None
    assert (hardware.gpu.key, hardware.num_gpus) == (key, count)


@pytest.mark.parametrize(("visible", "count"), [("0,7,1", 1), ("MIG-abc", 0), ("zero", 0)])
def test_cuda_visible_devices_ends_at_the_first_entry_that_names_no_card(probe, visible, count):
    hardware = probe(FakeCard(), FakeCard(), visible=visible)
    assert hardware.num_gpus == count
    assert f"CUDA_VISIBLE_DEVICES={visible}" in hardware.warnings[0]


def test_ambiguous_uuid_prefix_names_no_card(probe):
    assert probe(FakeCard(), FakeCard(), visible="GPU-1").num_gpus == 0


def test_cards_split_by_mig_are_left_out_with_a_warning(probe):
    hardware = probe(FakeCard(mig=1), FakeCard(), FakeCard())
    assert hardware.num_gpus == 2
    assert hardware.warnings[0].startswith("1 GPUs ")
    assert "MIG" in hardware.warnings[0]


def test_only_mig_cards_is_no_gpu(probe):
    hardware = probe(FakeCard(mig=1))
    assert (hardware.gpu, hardware.num_gpus) == (None, 0)
    assert "MIG" in hardware.warnings[0]


def test_no_driver_is_no_gpu_without_a_warning(probe):
    hardware = probe(init_error="NVML Shared Library Not Found", driver_loaded=False)
    assert (hardware.gpu, hardware.num_gpus, hardware.warnings) == (None, 0, ())


def test_driver_whose_library_fails_is_told(probe):
    hardware = probe(init_error="RM has detected an NVML/RM version mismatch.")
    assert hardware.gpu is None
    assert "version mismatch" in hardware.warnings[0]


def test_library_that_fails_after_its_start_is_told_and_shut_down(probe):
    hardware = probe(count_error="GPU is lost")
    assert hardware.gpu is None
    assert "GPU is lost" in hardware.warnings[0]
    assert sys.modules["pynvml"].shutdowns == 1


@pytest.mark.parametrize(("driver_loaded", "warnings"), [(False, 0), (True, 1)])
def test_missing_nvml_package_matters_only_with_a_driver(monkeypatch, driver_loaded, warnings):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu_probe, "DRIVER_FILE", Path(__file__ if driver_loaded else "/nowhere"))
    hardware = probe_hardware()
    assert hardware.gpu is None
    assert len(hardware.warnings) == warnings


def test_probe_without_gpus_does_not_ask_nvml(monkeypatch):
    fake = FakeNvml([FakeCard()], init_error="must not be asked")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    hardware = probe_hardware(without_gpus=True)
    assert (hardware.gpu, hardware.num_gpus, hardware.warnings) == (None, 0, ())
    assert hardware.cpu is not None


def test_driver_is_seen_by_its_file_in_proc(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert bool(probe_hardware().warnings) == Path("/proc/driver/nvidia/version").exists()
