"""Writes a model without weights: vLLM makes them up (--load-format dummy)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

_TINY_MOE = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


def write_dummy_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """Write the bundled model's configuration and tokenizer, with the fields `shape` in place of its own, to `folder`.

    Returns:
        `folder`, which is made.
    """
    folder.mkdir()
    config = json.loads((_TINY_MOE / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **shape}), encoding="utf-8")
    for path in _TINY_MOE.glob("*token*"):
        shutil.copy(path, folder)
    return folder
