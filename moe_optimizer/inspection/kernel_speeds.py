"""Reads and writes the tables of kernel speeds: those of this package, and those measured on this machine."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.plan.json_codec import decode_text, encode
from moe_optimizer.resources import cache_dir, config_dir
from moe_optimizer.specs.hardware import CpuSpec
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, SpeedTables

SCHEMA_VERSION = 1
_MAX_FILE_BYTES = 5_000_000
_FOLDER = "kernel_speeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableFile:
    tables: tuple[KernelSpeeds, ...]
    schema_version: int = SCHEMA_VERSION


def measured_dir() -> Path:
    """Return where this user's measured tables lie."""
    return cache_dir() / _FOLDER


def shipped_dir() -> Path:
    """Return where the shipped tables lie."""
    return config_dir() / _FOLDER


def read_kernel_speeds(cache: Path | None = None) -> SpeedTables:
    """Return all tables, the shipped ones first. A file that cannot be read becomes a warning: without it a plan only
    knows less.

    Args:
        cache: the user's folder; None: `measured_dir()`.
    """
    tables: list[KernelSpeeds] = []
    warnings: list[str] = []
    folders = (shipped_dir(), measured_dir() if cache is None else cache)
    for path in (path for folder in folders for path in _json_files(folder, warnings)):
        try:
            tables += read_tables(path)
        except InputError as error:
            warnings.append(f"{path}: kernel speeds not used: {error}")
    return SpeedTables(tables=tuple(tables), warnings=tuple(warnings))


def _json_files(folder: Path, warnings: list[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(".json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        warnings.append(f"{folder}: kernel speeds not used: cannot be read: {error.strerror}")
        return []


def read_tables(path: Path) -> tuple[KernelSpeeds, ...]:
    """Return the tables of one file.

    Raises:
        InputError: it cannot be read, or is not such a file.
    """
    text = read_text(path, max_bytes=_MAX_FILE_BYTES, name=path.name)
    file = decode_text(_TableFile, text, origin=path.name, schema_version=SCHEMA_VERSION)
    return tuple(_checked(table, path) for table in file.tables)


def _checked(table: KernelSpeeds, path: Path) -> KernelSpeeds:
    numbers = [row.tokens for row in table.rows]
    if not numbers or numbers[0] < 1 or any(b <= a for a, b in itertools.pairwise(numbers)):
        raise InputError(f"{path.name}: rows: expected ascending numbers of tokens from 1 on")
    for row in table.rows:
        if not all(time > 0 for time in (row.stock_us, *row.ours_us.values())):
            raise InputError(f"{path.name}: rows: expected times above 0 at {row.tokens} tokens")
    return table


def write_tables(path: Path, tables: tuple[KernelSpeeds, ...]) -> None:
    """Write one file of tables, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, json.dumps(encode(_TableFile(tables=tables)), indent=1, sort_keys=True) + "\n")


def cpu_device(cpu: CpuSpec, threads: int) -> str:
    """Return how the tables call this processor with so many threads: what its speed depends on."""
    return f"{cpu.name} ({'+'.join(sorted(cpu.isa)) or 'no vector instructions'}), {threads} threads"
