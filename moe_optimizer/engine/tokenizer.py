"""Loads the tokenizer, and the tokens that end an output."""

from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.tokenizer_files import find_tokenizer

_WITHOUT = "skip_tokenizer_init=True takes and returns token ids"


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder."""
    from transformers import AutoTokenizer

    if not find_tokenizer(folder):
        # Transformers would make one of no tokens.
        raise InputError(f"tokenizer: got {str(folder)!r}, expected a folder with tokenizer.json", hint=_WITHOUT)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"tokenizer: {folder}: {str(error).splitlines()[0]}", hint=_WITHOUT) from None
    if not tokenizer.is_fast:
        raise UnsupportedError(f"tokenizer: got {type(tokenizer).__name__}, expected one with tokenizer.json")
    return tokenizer


def chat_text(tokenizer: Any | None, messages: Any, **options: Any) -> str:
    """Return a conversation as the model's template writes it, by default up to where the answer begins."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise InputError("messages: got a conversation, and the model has no chat template", hint="use completions")
    try:
        return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **options, "tokenize": False})
    except Exception as error:  # noqa: BLE001  (a template computes what it likes with messages and options)
        raise InputError(f"messages: {error}") from None


def end_token_ids(config: Any, folder: Path, tokenizer: Any | None) -> frozenset[int]:
    """Return the tokens that end an output: of the tokenizer, config.json and generation_config.json.

    Those beyond the model's vocabulary, which a tokenizer may have, are left out.
    """
    found: list[Any] = [getattr(config, "eos_token_id", None), tokenizer and tokenizer.eos_token_id]
    found.append(generation_defaults(folder).get("eos_token_id"))
    ids = [each for ids in found for each in (ids if isinstance(ids, list) else [ids]) if each is not None]
    return frozenset(each for each in ids if each < config.vocab_size)


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json says, {} without one."""
    path = folder / "generation_config.json"
    return read_json_object(path) if path.exists() else {}
