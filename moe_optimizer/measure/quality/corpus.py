"""Reads the texts on which servers are compared: the shipped ones, or the user's."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.resources import config_dir

_MAX_BYTES = 64 << 20


def shipped_texts() -> tuple[str, ...]:
    """Return the texts of configs/corpus, in the order of their names."""
    paths = sorted((config_dir() / "corpus").glob("*.txt"))
    return tuple(read_text(path, max_bytes=_MAX_BYTES) for path in paths)


def text_of(path: Path) -> tuple[str, ...]:
    """Return the text of a file.

    Raises:
        InputError: it cannot be read, or is empty.
    """
    text = read_text(path, max_bytes=_MAX_BYTES)
    if not text.strip():
        raise InputError(f"{path}: got no text, expected some that is like the traffic to come")
    return (text,)


def prompts_of(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file, one a line; empty lines are left out. A backslash with an n is a line's end.

    Raises:
        InputError: it cannot be read, or holds none.
    """
    lines = read_text(path, max_bytes=_MAX_BYTES).splitlines()
    prompts = tuple(line.replace("\\n", "\n") for line in lines if line.strip())
    if not prompts:
        raise InputError(f"{path}: got no prompts, expected one a line")
    return prompts
