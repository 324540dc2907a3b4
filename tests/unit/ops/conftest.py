"""The kernels' emulation, once per session."""

from __future__ import annotations

import pytest

from tests.kernel_emulator import Emulator, build_emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    """Runs the CUDA kernels' source on the CPU."""
    return build_emulator()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the quick check compile no emulation, which takes half a minute of processor time."""
    for item in items:
        if "emulator" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.thorough)
