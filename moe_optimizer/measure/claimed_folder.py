"""Keeps what was measured of one question in one folder, in which a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import make_private_folder, read_text, write_atomically

_DIGEST_BYTES = 64


def make_run_folder(folder: Path) -> None:
    """Make the folder of one run, or take one that is there.

    Raises:
        InputError: something that is no folder is there.
    """
    try:
        make_private_folder(folder)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"--run-dir: got a file ({folder}), expected a folder", hint="name another folder") from None


def is_claimed(folder: Path, *, command: str) -> bool:
    """Return whether a command has asked its question in a folder."""
    return _mark(folder, command).exists()


def claim_folder(folder: Path, question: Any, *, command: str) -> None:
    """Create the folder, or take one in which the same question was asked.

    Args:
        folder: of one run.
        question: JSON values, equal where what was measured may be put together.
        command: that asks; it names the file in which the question's digest is kept.

    Raises:
        InputError: what another question measured is there, or the folder is a file.
    """
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]
    make_run_folder(folder)
    mark = _mark(folder, command)
    if not mark.exists():
        write_atomically(mark, digest + "\n")
    elif read_text(mark, max_bytes=_DIGEST_BYTES).strip() != digest:
        raise InputError(
            f"--run-dir: {folder} has what {command} measured of other plans or requests",
            hint="name another folder, or remove this one",
        )


def _mark(folder: Path, command: str) -> Path:
    return folder / f"{command}.digest"
