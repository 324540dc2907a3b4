"""Reads JSON that somebody else wrote, with bounds on time and memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_bytes

MAX_CONFIG_BYTES = 4 << 20
"""Largest configuration read. Real ones are under 1 MiB; parsing costs up to thirty times the text in memory."""
MAX_DEPTH = 64
"""Deepest nesting parsed. Real files stay under ten; json recurses, and would exhaust the stack."""

LFS_POINTER = b"version https://git-lfs"
"""How the small file begins that git-lfs leaves in place of one that it has not fetched."""
LFS_HINT = "fetch the files themselves: git lfs pull"

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_json_object(
    path: Path, *, max_bytes: int = MAX_CONFIG_BYTES, repeated: list[str] | None = None
) -> dict[str, object]:
    """Return the object in the JSON file `path`.

    Duplicate keys keep the last value and the tokens NaN and Infinity are read as floats, as Python's own
    reader (and so transformers and vLLM) does.

    Args:
        path: the file.
        max_bytes: the largest size that is read.
        repeated: gets a warning for each key that an object has twice.

    Raises:
        InputError: not a regular readable file, too large, nested too deeply, not UTF-8, not JSON, not an object.
    """
    data = read_bytes(path, max_bytes=max_bytes, name=path.name)
    return parse_json_object(data, name=path.name, repeated=repeated)


def parse_json_object(data: bytes, *, name: str, repeated: list[str] | None = None) -> dict[str, object]:
    """Parse `data` as a JSON object; `name` is what error messages call the file, `repeated` as in `read_json_object`.

    Raises:
        InputError: empty, nested too deeply, not UTF-8, not JSON, not an object.
    """
    if not data.strip():
        raise InputError(f"{name}: the file is empty, expected a JSON object")
    if data.startswith(LFS_POINTER):
        raise InputError(f"{name}: got a git-lfs pointer, expected a JSON object", hint=LFS_HINT)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: byte {error.start} is not UTF-8 text, expected a JSON object") from None
    _check_depth(data, name)
    try:
        value = json.loads(text, object_pairs_hook=None if repeated is None else _noting(name, repeated))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}",
            hint="the file may be cut off; download it again" if error.pos >= len(data.rstrip()) - 1 else None,
        ) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise InputError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{name}: got {kind_of(value)}, expected an object")
    return value


def kind_of(value: object) -> str:
    """Return the JSON name of a parsed value's type, for error messages."""
    names: dict[type, str]
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: object) -> str:
    """Return a value short enough for an error message; objects and arrays by kind only."""
    if isinstance(value, (dict, list)):
        return kind_of(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**24:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, (str, bool, type(None))) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _noting(name: str, repeated: list[str]) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    """Return what makes an object of its pairs and notes the keys that it has twice."""

    def as_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.extend(
                f"{name}: {key[:80]}: is given {count} times, the last counts: {shown(value[key])}"
                for key, count in counts.items()
                if count > 1
            )
        return value

    return as_object


def _check_depth(data: bytes, name: str) -> None:
    """Refuse deep nesting by removing the innermost pairs of brackets, as often as levels are allowed.

    Each round is one pass in C, so that a file of nothing but brackets costs no more than any other.
    """
    brackets = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    # What is left of a broken file is its unclosed brackets; the parser would recurse into those too.
    if brackets.count(b"[") + brackets.count(b"{") > MAX_DEPTH:
        raise InputError(f"{name}: nested more than {MAX_DEPTH} levels deep")
