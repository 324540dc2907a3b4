"""Checks for the doctor what the embedded engine needs, and what makes it faster. Imports none of it here."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator

from moe_optimizer.cli.check import Check, why_python_fails
from moe_optimizer.cli.package_checks import package_version
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.inspection.vllm_installation import flash_attention_versions

PACKAGES = ("torch", "transformers", "safetensors", "fastapi", "uvicorn", "jinja2")
IMPORTS = {
    "embedded engine": "import moe_optimizer.engine",
    "triton": "import triton",
    "flash-attn": "import flash_attn",
}
"""By row, run in a process of its own: packages that are there may not fit each other."""
_FLASH_ATTENTION_GLIBC = (2, 32)
"""The oldest C library that FlashAttention's wheels run on."""


def engine_checks(*, has_gpu: bool) -> Iterator[Check]:
    """Yield the packages of the embedded engine, and on a machine with a GPU its faster kernels, each apart."""
    absent = missing_packages()
    if absent:
        yield Check(
            "embedded engine", "note", f"not installed: {', '.join(absent)}; --engine embedded needs it",
            "run: pip install 'moe-optimizer[engine]'",
        )  # fmt: skip
    else:
        yield _imported("embedded engine", ", ".join(f"{name} {package_version(name)}" for name in PACKAGES))
    if has_gpu:
        yield _triton()
        yield _flash_attention()


def check_packages() -> None:
    """Refuse to go on without them.

    Raises:
        UnsupportedError: names those that are missing.
    """
    absent = missing_packages()
    if absent:
        raise UnsupportedError(f"not installed: {', '.join(absent)}", hint="run: pip install 'moe-optimizer[engine]'")


def missing_packages() -> list[str]:
    """Return which packages of the embedded engine cannot be imported."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def _imported(name: str, version: str | None) -> Check:
    """Return the row of what is installed, after it was imported."""
    if why_not := why_python_fails("-c", IMPORTS[name]):
        return Check(name, "note", f"cannot be imported: {why_not}", f"run: python -c '{IMPORTS[name]}'")
    return Check(name, "ok", version or "installed, version unknown")


def _triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        lost = "not installed: the embedded engine gathers the KV blocks of each step instead of reading them in place"
        return Check("triton", "note", lost, "it comes with torch for CUDA")
    return _imported("triton", package_version("triton"))


def _flash_attention() -> Check:
    if importlib.util.find_spec("flash_attn") is not None:
        return _imported("flash-attn", package_version("flash-attn"))
    if brought := flash_attention_versions():
        return Check("flash-attn", "ok", f"version {' and '.join(map(str, brought))}, as vLLM brings it")
    name, version = platform.libc_ver()
    detail = "not installed: the embedded engine's attention runs through our Triton kernels"
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) < _FLASH_ATTENTION_GLIBC:
        wanted = ".".join(map(str, _FLASH_ATTENTION_GLIBC))
        return Check("flash-attn", "note", f"{detail}; its wheels need glibc {wanted}, found {version}")
    return Check("flash-attn", "note", detail)
