"""Patches as data: probed, applied once, reported, undone; on modules written for the test."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_optimizer.vllm_plugin.compat import definition_source, fingerprint
from moe_optimizer.vllm_plugin.patch import Patch, PatchState, apply_when_imported, patch_reports, undo
from tests.plugin_state import own_patches

SOURCE = "def choose(backend):\n    return [backend]\n"
_numbers = itertools.count()

Module = Callable[..., tuple[str, Path]]


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own_patches(monkeypatch)
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a module that can be imported, and returns its name and file."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str = SOURCE) -> tuple[str, Path]:
        name = f"patched_module_{next(_numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        importlib.invalidate_caches()
        return name, path

    return write


def patch_of(name: str, replacement: Any = None) -> Patch:
    return Patch(
        target=f"{name}:choose",
        why="test",
        remove_when="never",
        fingerprints={"1.0": fingerprint(SOURCE.rstrip("\n"))},
        replacement=replacement or (lambda original: lambda backend: ["ours", *original(backend)]),
    )


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_an_imported_module_is_patched_at_once(module: Module) -> None:
    name, _ = module()
    loaded = imported(name)
    report = apply_when_imported(patch_of(name))
    assert report.state is PatchState.APPLIED
    assert loaded.choose("cpu") == ["ours", "cpu"]


def test_everybody_who_asked_for_a_patch_hears_what_became_of_it(module: Module) -> None:
    name, _ = module()
    heard: list[tuple[str, PatchState]] = []
    for who in ("first", "second"):
        apply_when_imported(patch_of(name), on_change=lambda report, who=who: heard.append((who, report.state)))
    assert heard == []
    imported(name)
    assert heard == [("first", PatchState.APPLIED), ("second", PatchState.APPLIED)]


def test_a_module_that_took_the_function_before_gets_the_new_one_and_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"patched_package_{next(_numbers)}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "oracle.py").write_text(SOURCE)
    (tmp_path / package / "user.py").write_text("from .oracle import choose\nfrom .oracle import choose as pick\n")
    monkeypatch.syspath_prepend(tmp_path)
    user = imported(f"{package}.user")
    patch = patch_of(f"{package}.oracle")
    assert apply_when_imported(patch).state is PatchState.APPLIED
    assert user.choose("cpu") == user.pick("cpu") == ["ours", "cpu"]
    assert undo(patch.target)
    assert user.choose("cpu") == user.pick("cpu") == ["cpu"]


def test_a_module_that_is_not_imported_is_patched_when_it_is(module: Module) -> None:
    name, _ = module()
    report = apply_when_imported(patch_of(name))
    assert report.state is PatchState.ARMED
    assert name not in sys.modules
    assert imported(name).choose("cpu") == ["ours", "cpu"]
    assert report.state is PatchState.APPLIED


def test_applying_twice_patches_once(module: Module) -> None:
    name, _ = module()
    apply_when_imported(patch_of(name))
    loaded = imported(name)
    apply_when_imported(patch_of(name))
    assert loaded.choose("cpu") == ["ours", "cpu"]
    assert len(patch_reports()) == 1


def test_a_changed_source_is_refused_and_left_alone(module: Module) -> None:
    name, _ = module("def choose(backend):\n    return [backend, 'new']\n")
    report = apply_when_imported(patch_of(name))
    assert imported(name).choose("cpu") == ["cpu", "new"]
    assert report.state is PatchState.REFUSED
    assert "choose changed" in report.detail
    assert "1.0" in report.detail


def test_a_function_that_is_gone_is_refused(module: Module) -> None:
    name, _ = module("other = 1\n")
    report = apply_when_imported(patch_of(name))
    imported(name)
    assert report.state is PatchState.REFUSED
    assert "gone" in report.detail


def test_a_function_that_somebody_else_replaced_is_refused(module: Module) -> None:
    name, _ = module()
    loaded: Any = imported(name)
    loaded.choose = test_applying_twice_patches_once
    report = apply_when_imported(patch_of(name))
    assert report.state is PatchState.REFUSED
    assert "before us" in report.detail


def test_an_exception_while_patching_does_not_reach_the_importer(module: Module) -> None:
    def broken(original: Any) -> Any:
        raise RuntimeError("injected")

    name, _ = module()
    report = apply_when_imported(patch_of(name, replacement=broken))
    assert imported(name).choose("cpu") == ["cpu"]
    assert report.state is PatchState.REFUSED
    assert "injected" in report.detail


def test_undo_restores_the_original(module: Module) -> None:
    name, _ = module()
    loaded: Any = imported(name)
    original = loaded.choose
    apply_when_imported(patch_of(name))
    assert undo(f"{name}:choose")
    assert loaded.choose is original
    assert not undo(f"{name}:choose")


def test_the_listener_hears_of_a_late_change(module: Module) -> None:
    name, _ = module()
    heard = []
    apply_when_imported(patch_of(name), on_change=lambda report: heard.append(report.state))
    imported(name)
    assert heard == [PatchState.APPLIED]


def test_source_of_nested_and_assigned_names(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text("table: dict = {}\n\nclass A:\n    def run(self):\n        return 1\n")
    assert definition_source(path, "A.run") == "def run(self):\n    return 1"
    assert definition_source(path, "table") == "table: dict = {}"
    assert definition_source(path, "A.walk") is None


METHOD_SOURCE = "class Router:\n    def choose(self, backend):\n        return [backend]\n"


def test_a_method_is_patched_and_undone_on_its_class(module: Module) -> None:
    name, _ = module(METHOD_SOURCE)
    patch = Patch(
        target=f"{name}:Router.choose",
        why="test",
        remove_when="never",
        fingerprints={"1.0": fingerprint("def choose(self, backend):\n    return [backend]")},
        replacement=lambda original: lambda self, backend: ["ours", *original(self, backend)],
    )
    router = imported(name).Router()
    assert apply_when_imported(patch).state is PatchState.APPLIED
    assert router.choose("cpu") == ["ours", "cpu"]
    assert undo(patch.target)
    assert router.choose("cpu") == ["cpu"]


def test_a_class_that_is_gone_is_refused(module: Module) -> None:
    name, _ = module()
    report = apply_when_imported(
        Patch(target=f"{name}:Router.choose", why="t", remove_when="n", fingerprints={}, replacement=lambda each: each)
    )
    imported(name)
    assert report.state is PatchState.REFUSED
    assert "Router.choose is gone" in report.detail
