"""The kernels' emulation, once per session."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.kernel_emulator import COMPILED_WITHIN_S, Emulator, build_emulator, compiled_emulation


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    """Runs the CUDA kernels' source on the CPU."""
    return build_emulator()


@pytest.fixture(scope="session")
def gate_emulator() -> ModuleType:
    """Runs the gate's CUDA kernel on the CPU: `cuda_gate_layout`, and `cuda_gate_run` with a seed as stream."""
    return compiled_emulation("emulated_gate")


@pytest.fixture(scope="session")
def skinny_emulator() -> ModuleType:
    """Runs the CUDA kernel of `skinny_gemm` on the CPU, as `gate_emulator` does the gate's."""
    return compiled_emulation("emulated_skinny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the quick check compile no emulation, which takes half a minute of processor time.

    Whoever needs one may have to wait until another test worker has compiled all three.
    """
    for item in items:
        if {"emulator", "gate_emulator", "skinny_emulator"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.thorough)
            item.add_marker(pytest.mark.timeout(3 * COMPILED_WITHIN_S))
