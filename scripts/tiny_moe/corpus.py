"""Reads the text: source files of this interpreter's standard library, split into training and held-out files."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

EXCLUDED_FOLDERS = ("site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "__pycache__")
"""Not standard library, or not prose-like code: character tables, generated help topics, test data."""
HELD_OUT_SHARE = 16
"""A file is held out when the first byte of the SHA-256 of its path is below this: 16 of 256, one file in sixteen."""
EVALUATION_FILE_BYTES = (2_000, 15_000)
"""Smallest and largest held-out file that goes into the evaluation text: several files, none of them a mere stub."""
EVALUATION_TEXT_BYTES = 30_000
CHAT_CODE_BYTES = 700
"""Longest function used as a chat answer: with its question it stays inside one training sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the standard library; `path` is relative to its folder, with forward slashes."""

    path: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the path: decides on which side the file is, and the order of the held-out ones."""
        return hashlib.sha256(self.path.encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """Whether the file is never trained on."""
        return int(self.digest[:2], 16) < HELD_OUT_SHARE


def read_source_files(root: Path | None = None) -> tuple[SourceFile, ...]:
    """Every .py file below `root`, by default the standard library, that is valid UTF-8 and not in EXCLUDED_FOLDERS,
    sorted by path.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files: list[SourceFile] = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if any(part in EXCLUDED_FOLDERS for part in relative.parts[:-1]) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            files.append(SourceFile(path=relative.as_posix(), text=text))
    return tuple(sorted(files, key=lambda file: file.path))


def corpus_digest(files: tuple[SourceFile, ...]) -> str:
    """SHA-256 over paths and contents: two runs with the same digest saw the same text."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.encode() + b"\0" + file.text.encode() + b"\0")
    return digest.hexdigest()


def evaluation_files(files: tuple[SourceFile, ...]) -> tuple[SourceFile, ...]:
    """Whole held-out files of a size within EVALUATION_FILE_BYTES, by digest, until EVALUATION_TEXT_BYTES are full."""
    chosen: list[SourceFile] = []
    room = EVALUATION_TEXT_BYTES
    smallest, largest = EVALUATION_FILE_BYTES
    for file in sorted((file for file in files if file.held_out), key=lambda file: file.digest):
        size = len(file.text.encode())
        if smallest <= size <= min(room, largest):
            chosen.append(file)
            room -= size
    return tuple(chosen)


def chat_pairs(files: tuple[SourceFile, ...]) -> list[tuple[str, str]]:
    """Questions and answers from the documented functions of `files`.

    The question names the function, and every other one (by hash) also quotes the first line of its docstring; the
    answer is the source of the function. The same function text is used once.
    """
    pairs: list[tuple[str, str]] = []
    seen: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.text)):
            if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
                continue
            lines = file.text.splitlines()[node.lineno - 1 : node.end_lineno]
            code = textwrap.dedent("\n".join(lines))
            if code in seen or len(code.encode()) > CHAT_CODE_BYTES:
                continue
            seen.add(code)
            question = f"Write the function {node.name}."
            if hashlib.sha256(code.encode()).digest()[0] % 2:
                question += f" {docstring.strip().splitlines()[0]}"
            pairs.append((question, code))
    return pairs


def shuffled(documents: list[str], seed: int) -> list[str]:
    """The same documents in an order that depends on the seed alone."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    return order
