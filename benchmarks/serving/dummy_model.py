"""Writes a model without weights: vLLM makes them up (--load-format dummy)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_TINY_MOE = _ROOT / "examples" / "tiny-moe"
_PUBLISHED = _ROOT / "tests" / "data" / "model_configs"


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


def published_shapes() -> tuple[str, ...]:
    """Return the names that `write_published_shape` takes."""
    return tuple(sorted(path.stem for path in _PUBLISHED.glob("*.json")))


def write_published_shape(folder: Path, name: str) -> Path:
    """Write the published configuration `name`, and a stand-in tokenizer with one word for each of its tokens.

    Returns:
        `folder`, which is made.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    config = json.loads((_PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    # The code that such a field names is not here; vLLM and transformers have their own.
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(config["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    end = f"t{config.get('eos_token_id') or 0}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
