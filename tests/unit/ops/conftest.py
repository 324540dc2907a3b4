"""The kernels' emulation, once per session."""

from __future__ import annotations

import pytest

from tests.kernel_emulator import Emulator, build_emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    """Runs the CUDA kernels' source on the CPU."""
    return build_emulator()
