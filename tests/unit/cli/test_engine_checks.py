"""The doctor's rows of the embedded engine: its packages, and with a GPU Triton and FlashAttention apart."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata

import pytest

from moe_optimizer.cli import engine_checks
from moe_optimizer.cli.check import Check, why_python_fails


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that are found, and their distributions; glibc is a new one."""
    names = {*engine_checks.PACKAGES, "triton", "flash_attn"}
    distributions = {name.replace("_", "-") for name in names}

    def version(name: str) -> str:
        if name in distributions and name.replace("-", "_") in names:
            return "1.2.3"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(engine_checks, "IMPORTS", dict.fromkeys(engine_checks.IMPORTS, "pass"))
    monkeypatch.setattr(engine_checks, "flash_attention_versions", tuple)
    return names


def checks(*, has_gpu: bool = True) -> dict[str, Check]:
    return {check.name: check for check in engine_checks.engine_checks(has_gpu=has_gpu)}


def test_what_is_installed_is_shown_with_its_version(installed: set[str]) -> None:
    assert {name: (check.status, "1.2.3" in check.detail) for name, check in checks().items()} == {
        "embedded engine": ("ok", True), "triton": ("ok", True), "flash-attn": ("ok", True),
    }  # fmt: skip


@pytest.mark.parametrize("name", engine_checks.PACKAGES)
def test_a_package_that_the_engine_lacks_is_named(installed: set[str], name: str) -> None:
    installed.remove(name)
    check = checks()["embedded engine"]
    assert (check.status, name in check.detail) == ("note", True)
    assert "moe-optimizer[engine]" in (check.hint or "")


@pytest.mark.parametrize(
    ("row", "script", "reason"),
    [
        ("embedded engine", "import no_such_module", "No module named 'no_such_module'"),
        ("embedded engine", "import os; os.abort()", "SIGABRT"),
        ("triton", "import no_such_module", "No module named 'no_such_module'"),
        ("flash-attn", "import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_packages_that_are_there_and_cannot_be_imported_are_a_note_with_the_reason(
    installed: set[str], monkeypatch: pytest.MonkeyPatch, row: str, script: str, reason: str
) -> None:
    monkeypatch.setitem(engine_checks.IMPORTS, row, script)
    check = checks()[row]
    assert (check.status, reason in check.detail) == ("note", True)
    assert script in (check.hint or "")


@pytest.mark.thorough
def test_the_import_that_is_tried_is_one_that_works() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    assert why_python_fails("-c", engine_checks.IMPORTS["embedded engine"]) == ""


@pytest.mark.parametrize(("module", "row"), [("triton", "triton"), ("flash_attn", "flash-attn")])
def test_a_faster_kernel_that_is_absent_is_a_note_of_its_own(installed: set[str], module: str, row: str) -> None:
    installed.remove(module)
    assert {name for name, check in checks().items() if check.status == "note"} == {row}


def test_the_flash_attention_that_vllm_brings_is_one(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.remove("flash_attn")
    monkeypatch.setattr(engine_checks, "flash_attention_versions", lambda: (2, 3))
    check = checks()["flash-attn"]
    assert (check.status, check.detail) == ("ok", "version 2 and 3, as vLLM brings it")


def test_without_a_gpu_neither_is_looked_for(installed: set[str]) -> None:
    assert checks(has_gpu=False).keys() == {"embedded engine"}


@pytest.mark.parametrize(
    ("libc", "named"),
    [(("glibc", "2.31"), True), (("glibc", "2.9"), True), (("glibc", "2.32"), False), (("", ""), False)],
    ids=str,
)
def test_a_glibc_too_old_for_the_wheels_of_flash_attention_is_named(
    installed: set[str], monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str], named: bool
) -> None:
    installed.remove("flash_attn")
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    check = checks()["flash-attn"]
    assert check.status == "note"
    assert ("glibc 2.32" in check.detail and libc[1] in check.detail) is named
