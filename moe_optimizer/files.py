"""Reads files within a bound, and writes them so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from moe_optimizer.errors import InputError


@contextlib.contextmanager
def open_regular(path: Path, *, name: str | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading; what fails while it is open fails as an InputError.

    Args:
        path: the file.
        name: what error messages call it; None: its path.

    Raises:
        InputError: missing, unreadable, or not a regular file (a pipe would block, a device never ends).
    """
    try:
        # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise _refused(path, name, f"cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refused(path, name, "is not a regular file")
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            yield stream
    except OSError as error:
        raise _refused(path, name, f"cannot be read: {error.strerror or error}") from None
    finally:
        os.close(descriptor)


def read_bytes(path: Path, *, max_bytes: int, name: str | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file.
        max_bytes: the largest size that is read.
        name: what error messages call the file; None: its path.

    Raises:
        InputError: see `open_regular`, or the file is larger.
    """
    with open_regular(path, name=name) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise _refused(path, name, f"got {size} bytes, expected at most {max_bytes}")
        return stream.read(max_bytes)


def read_text(path: Path, *, max_bytes: int, name: str | None = None) -> str:
    """Return the content of a regular file of UTF-8 text; see `read_bytes`.

    Raises:
        InputError: see `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes=max_bytes, name=name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(path, name, f"byte {error.start} is not UTF-8 text") from None


def read_json(path: Path, *, max_bytes: int) -> Any:
    """Return what a regular file of JSON holds; see `read_bytes`.

    Raises:
        InputError: see `read_text`, or it is not JSON.
    """
    text = read_text(path, max_bytes=max_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, None, f"is not JSON: {error}") from None


def _refused(path: Path, name: str | None, problem: str) -> InputError:
    name = str(path) if name is None else name
    return InputError(f"{name}: {problem}", hint=None if str(path) in name else f"looked at {path}")


def make_private_folder(path: Path) -> None:
    """Make a folder with every folder above it that is missing, mode 0700; one that is there keeps its mode.

    Raises:
        OSError: one cannot be created, or is something else.
    """
    # Path.mkdir gives the mode to the last one only: others could list a run folder made for the proofs below it.
    folders = [*reversed([path, *path.parents])]
    try:
        _make_private(folders)
    except FileNotFoundError:
        # The check of another start has made one, and removed it again before anything was below.
        _make_private(folders)


def _make_private(folders: Iterable[Path]) -> None:
    for folder in folders:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True, mode=0o700)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content`, text as UTF-8, to `path` through a temporary file in the same folder and a rename, mode 0600.

    A process killed at any point leaves the old file or the new one, never a part. Missing folders are made private.

    Raises:
        OSError: the folder cannot be created or written.
    """
    make_private_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def text_or_nothing(path: Path) -> str:
    """Return the text of a file of the system or of an installed package, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
