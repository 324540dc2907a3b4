"""Reads from the build's manifest which kernels `build.sh` built; loads nothing."""

from __future__ import annotations

import importlib.machinery
import json
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.specs.software import KernelInventory

_BUILD_HINT = 'run "bash build.sh"'
_MAX_MANIFEST_BYTES = 1_000_000
_TEXT_LISTS = ("cpu_ops", "cuda_ops", "cuda_archs")


def read_kernel_inventory(folder: Path | None = None) -> KernelInventory:
    """Return what the manifest says is built, or why nothing usable is.

    Args:
        folder: where build_info.json and the extension module lie; None: the package's ops folder.

    A manifest without its extension module, or with one for another Python, counts as not built.
    """
    folder = Path(__file__).resolve().parent.parent / "ops" if folder is None else folder
    manifest = folder / "build_info.json"
    if not manifest.exists():
        return _not_built(f"kernels are not built; {_BUILD_HINT}")
    try:
        data: Any = json.loads(read_text(manifest, max_bytes=_MAX_MANIFEST_BYTES, name=manifest.name))
    except (InputError, json.JSONDecodeError, RecursionError) as error:
        return _not_built(f"cannot read {manifest.name}: {error}; {_BUILD_HINT} again")
    problem = _manifest_problem(data) or _extension_problem(folder, data["extension"])
    if problem:
        return _not_built(f"{problem}; {_BUILD_HINT} again")
    return KernelInventory(
        built=True,
        reason="",
        **{key: tuple(data[key]) for key in _TEXT_LISTS},
        source_hash=data["source_hash"],
        # The manifest of an older build lacks these.
        cpu_sources=_text(data, "sources", "cpu"),
        cuda_sources=_text(data, "sources", "cuda"),
        cuda_why_not=_text(data, "cuda_why_not"),
    )


def _text(value: Any, *keys: str) -> str:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _manifest_problem(data: Any) -> str:
    if not isinstance(data, dict):
        return f"build_info.json: got {type(data).__name__}, expected an object"
    for key in ("source_hash", "extension"):
        if not isinstance(data.get(key), str) or not data[key]:
            return f"build_info.json: {key}: got {data.get(key)!r:.80}, expected text"
    for key in _TEXT_LISTS:
        value = data.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return f"build_info.json: {key}: got {value!r:.80}, expected a list of texts"
    return ""


def _extension_problem(folder: Path, extension: str) -> str:
    if Path(extension).name != extension:
        return f"build_info.json: extension: got {extension!r}, expected a file name"
    # The whole ending: importing would try "_kernels.cpython-312-....so" under no name on Python 3.11.
    suffix = extension[extension.find(".") :]
    if suffix not in importlib.machinery.EXTENSION_SUFFIXES:
        expected = importlib.machinery.EXTENSION_SUFFIXES[0]
        return f"the kernels were built for another Python: {extension}, expected an ending of {expected}"
    if not (folder / extension).is_file():
        return f"the built kernels are gone: {extension} is missing"
    return ""


def _not_built(reason: str) -> KernelInventory:
    return KernelInventory(
        built=False,
        reason=reason,
        cpu_ops=(),
        cuda_ops=(),
        cuda_archs=(),
        source_hash="",
    )
