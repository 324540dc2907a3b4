"""The weight files of a model folder and its index: which there should be, what is missing, what is not listed."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.safetensors_header import MAX_INDEX_BYTES, read_tensors

_INDEX = "model.safetensors.index.json"


def expected_files(folder: Path, single: str) -> list[Path]:
    """Return the shards that the index of a checkpoint names, or without an index its one file `single`.

    Raises:
        InputError: the index names no files.
    """
    index = folder / f"{single}.index.json"
    if not index.exists():
        return [folder / single]
    named = read_json_object(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(named, dict):
        raise InputError(f"{index}: got no weight_map, expected an object that names the file of each tensor")
    # By name alone: an index does not say where else to read.
    return [folder / name for name in sorted({Path(str(each)).name for each in named.values()})]


def missing_weights(folder: Path) -> str:
    """Describe the weight files that a checkpoint lacks; "" if it lacks none.

    Raises:
        InputError, UnsupportedError: see `read_tensors`.
    """
    absent = sorted(name for name in set(_weight_map(folder).values()) if not (folder / name).is_file())
    if absent:
        return f"{len(absent)} files of {_INDEX} are not there, the first is {absent[0]}"
    if read_tensors(folder) is not None:
        return ""
    found = next(folder.glob("*.safetensors"), None)
    return "no safetensors file" if found is None else f"{found.name} is one of several files, the others are not there"


def first_unlisted(folder: Path, names: set[str]) -> str:
    """Describe the first tensor that only the index or only a header names; "" if they agree."""
    listed = _weight_map(folder).keys()
    if listed and listed - names:
        return f"{_INDEX}: {min(listed - names)} is in no file"
    if listed and names - listed:
        return f"{_INDEX}: {min(names - listed)} is not listed"
    return ""


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor according to the index; empty without an index."""
    if not (folder / _INDEX).exists():
        return {}
    entries = read_json_object(folder / _INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    return {str(key): str(value) for key, value in entries.items()} if isinstance(entries, dict) else {}
