"""Loads the tokenizer, and the tokens that end an output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder.

    Raises:
        InputError: there is none.
        UnsupportedError: it is not a fast one.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"tokenizer: got {str(folder)!r}, expected a folder with tokenizer.json: {str(error).splitlines()[0]}",
            hint="skip_tokenizer_init=True takes and returns token ids",
        ) from None
    if not tokenizer.is_fast:
        raise UnsupportedError(f"tokenizer: got {type(tokenizer).__name__}, expected one with tokenizer.json")
    return tokenizer


def end_token_ids(config: PreTrainedConfig, folder: Path, tokenizer: Any | None) -> frozenset[int]:
    """Return the tokens that end an output: of the tokenizer, config.json and generation_config.json."""
    found: list[Any] = [getattr(config, "eos_token_id", None), tokenizer and tokenizer.eos_token_id]
    found.append(generation_defaults(folder).get("eos_token_id"))
    return frozenset(each for ids in found for each in (ids if isinstance(ids, list) else [ids]) if each is not None)


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json says, {} without one."""
    path = folder / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
