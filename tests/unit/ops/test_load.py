"""Why the compiled kernels cannot be used, in words."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_optimizer.errors import KernelUnavailableError
from moe_optimizer.ops import _load


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What is found out is kept for the life of the process."""
    _load.import_kernels.cache_clear()
    yield
    _load.import_kernels.cache_clear()


def failing(monkeypatch: pytest.MonkeyPatch, error: ImportError) -> None:
    def import_module(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "kernels not built"),
        (
            ["_kernels.cpython-27-any.so"],
            "another Python: found _kernels.cpython-27-any.so, ",
        ),
    ],
)
def test_kernels_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: list[str], reason: str
) -> None:
    for name in found:
        (tmp_path / name).touch()
    monkeypatch.setattr(_load, "__file__", str(tmp_path / "_load.py"))
    failing(monkeypatch, ModuleNotFoundError("no module", name="moe_optimizer.ops._kernels"))
    available, why_not = _load.kernels_available()
    assert not available
    assert reason in why_not
    with pytest.raises(KernelUnavailableError) as refused:
        _load.kernels()
    assert refused.value.hint == "run: bash build.sh"


def test_kernels_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ImportError("libgomp.so.1: cannot open shared object file"))
    available, reason = _load.kernels_available()
    assert not available
    assert "libgomp.so.1" in reason


def test_a_module_that_the_kernels_lack_is_not_taken_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ModuleNotFoundError("no module", name="another"))
    with pytest.raises(ModuleNotFoundError):
        _load.kernels_available()
