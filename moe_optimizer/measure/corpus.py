"""Reads the texts that servers are asked about: the shipped ones, or the user's."""

from __future__ import annotations

import json
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


def prompts_of_lines(path: Path) -> tuple[str, ...]:
    """Return the prompts of a JSONL file: `prompt` of each line.

    Raises:
        InputError: it cannot be read, or a line has no prompt; the message names the line.
    """
    prompts = []
    for number, line in enumerate(read_text(path, max_bytes=_MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from None
        prompt = found.get("prompt") if isinstance(found, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f'{path}:{number}: got {line:.60}, expected an object with a text: {{"prompt": "..."}}')
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{path}: got no prompts, expected one JSON object a line")
    return tuple(prompts)
