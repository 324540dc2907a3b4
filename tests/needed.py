"""Skips test files whose packages are not installed."""

from __future__ import annotations

import importlib.util

import pytest


def skip_without(*packages: str) -> None:
    """Skip the test file that calls this at its top, unless all packages are installed.

    It does not import them, as `pytest.importorskip` does: every test worker imports every file when it collects.
    """
    for each in packages:
        if importlib.util.find_spec(each) is None:
            pytest.skip(f"needs {each}", allow_module_level=True)
