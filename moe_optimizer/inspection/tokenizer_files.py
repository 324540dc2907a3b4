"""Finds the tokenizer among the files of a model and checks that it is whole."""

from __future__ import annotations

import re
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.json_file import read_json_object

MAX_BYTES = 64 << 20
"""Read up to here; the largest published tokenizer.json has 34 MB. What is larger is left to vLLM."""
_CONFIG = "tokenizer_config.json"
_VOCABULARY = re.compile(r"tokenizer.*|tekken.*\.json|vocab.*|spiece.*|.*\.(tiktoken|model|model\.v\d+|spm|vocab|bpe)")
_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes that work on bytes or characters."""


def find_tokenizer(folder: Path) -> tuple[str, ...]:
    """Return the names of the tokenizer's files in a model folder; empty if there are none.

    A tokenizer made by the model's own code, or without a vocabulary, has only its configuration.

    Raises:
        InputError: one of its JSON files is broken, or is no file.
    """
    names = sorted(path.name for path in folder.iterdir())
    config = _read(folder, _CONFIG) if _CONFIG in names else {}
    found = tuple(name for name in names if _VOCABULARY.fullmatch(name) and name != _CONFIG)
    if "tokenizer.json" in found:
        # transformers prefers it to every other form and does not fall back.
        tokenizer = _read(folder, "tokenizer.json")
        if tokenizer is not None and not isinstance(tokenizer.get("model"), dict):
            raise InputError("tokenizer.json: model: is missing, expected the object with the vocabulary")
    elif "vocab.json" in found:
        _read(folder, "vocab.json")
    elif "tekken.json" in found:
        _read(folder, "tekken.json")
    if found or config is None:
        return found
    alone = config.get("auto_map") is not None or config.get("tokenizer_class") in _WITHOUT_VOCABULARY
    return (_CONFIG,) if alone else ()


def _read(folder: Path, name: str) -> dict[str, object] | None:
    """Return the object in a JSON file, None if the file is too large to be read here."""
    path = folder / name
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        return None
    return read_json_object(path, max_bytes=MAX_BYTES)
