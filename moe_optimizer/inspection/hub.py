"""Finds the folder that holds config.json for what the user named."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.inspection.weight_files import missing_weights

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""owner/name (or a bare name for a few old repositories), as the hub allows."""
METADATA_PATTERNS = ("config.json", "hf_quant_config.json", "*.safetensors.index.json")
"""Files fetched for a model that is not in the cache; never weights."""
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "merges.txt", "vocab.txt")
"""Configuration, index, tokenizer and chat template."""
_MAX_REVISION_BYTES = 256


def resolve_model(model: str | Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of a model: a folder as given, or a hub id's snapshot in the local cache.

    A hub id that is not cached is looked up online, its metadata files only, unless HF_HUB_OFFLINE is set.

    Raises:
        InputError: neither a readable folder with config.json nor a hub id that can be found.
    """
    environ = os.environ if environ is None else environ
    text = str(model)
    if not text.strip() or "\0" in text:
        raise InputError(f"model: got {text!r}, expected a folder or a hub id (owner/name)")
    folder = expanded(text)
    try:
        exists = folder.exists()
    except OSError as error:  # a name too long, a symlink loop, a parent that cannot be entered
        raise InputError(f"model {text}: cannot be read: {error.strerror}") from None
    if exists:
        return _checked_folder(folder, text)
    looks_like_path = isinstance(model, Path) or text.startswith(("/", ".", "~")) or text.count("/") > 1
    if looks_like_path or not HUB_ID.fullmatch(text):
        reason = "is a broken or looping symbolic link" if folder.is_symlink() else "no such folder"
        raise InputError(f"model {text}: {reason}", hint="give a folder that holds config.json, or a hub id")
    return _cached_snapshot(text, environ) or _fetch(text, METADATA_PATTERNS, environ)


def fetch_model(model: str, environ: Mapping[str, str] | None = None, *, weights: str = "*.safetensors") -> Path:
    """Return the folder of a model as `resolve_model` does, with weights and tokenizer.

    Of a hub id, what is not in the cache is fetched: files that match `weights`, and what a tokenizer is read from.

    Raises:
        InputError: as `resolve_model`, or the weights cannot be fetched. A folder is not looked into.
    """
    environ = os.environ if environ is None else environ
    folder = resolve_model(model, environ)
    if expanded(model).is_dir() or _has_weights(folder, weights):
        return folder
    return _fetch(model, (weights, *_BESIDE_WEIGHTS), environ)


def _has_weights(folder: Path, weights: str) -> bool:
    return not missing_weights(folder) if weights.endswith(".safetensors") else any(folder.glob(weights))


def expanded(path: str) -> Path:
    """Return `path` with a leading ~ or ~user replaced; as it is for a user that does not exist or has no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _checked_folder(folder: Path, text: str) -> Path:
    if not folder.is_dir():
        raise InputError(f"model {text}: is a file, expected a folder that holds config.json")
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise InputError(f"model {text}: cannot be read: {error.strerror}") from None
    if "config.json" not in names:
        if "params.json" in names:
            raise InputError(
                f"model {text}: config.json: is missing, found params.json: the format of Mistral's own tools",
                hint="take the repository's files in the format of transformers (config.json, model*.safetensors)",
            )
        gguf = next((name for name in sorted(names) if name.endswith(".gguf")), None)
        found = f"found {gguf}" if gguf else "expected a Hugging Face model folder"
        hint = "GGUF files are not supported" if gguf else "is this the folder that holds the weights?"
        raise InputError(f"model {text}: config.json: is missing, {found}", hint=hint)
    return folder


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the local hub cache: HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return expanded(environ[name])
    home = environ.get("HF_HOME")
    if home:
        return expanded(home) / "hub"
    return expanded(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _cached_snapshot(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    repository = hub_cache(environ) / f"models--{hub_id.replace('/', '--')}"
    snapshots = repository / "snapshots"
    try:
        revision = read_text(repository / "refs" / "main", max_bytes=_MAX_REVISION_BYTES).strip()
        candidates = [snapshots / revision] if revision and "/" not in revision else []
    except InputError:
        candidates = []
    try:
        candidates += sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        pass  # not cached at all
    except OSError as error:
        raise InputError(f"model {hub_id}: the hub cache {repository} cannot be read: {error.strerror}") from None
    # Not Path.is_file, which raises where a folder may not be entered.
    return next((path for path in candidates if os.path.isfile(path / "config.json")), None)  # noqa: PTH113


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    return any(
        environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _fetch(hub_id: str, patterns: Sequence[str], environ: Mapping[str, str]) -> Path:
    where = hub_cache(environ)
    if is_offline(environ):
        raise InputError(
            f"model {hub_id}: no such folder, and not all in the hub cache {where} (offline)",
            hint=f"where there is a network, without HF_HUB_OFFLINE: hf download {hub_id}",
        )
    # Slow to import (it brings an HTTP client), and only needed here.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    options = {"cache_dir": where, "endpoint": environ.get("HF_ENDPOINT") or None}
    try:
        folder = snapshot_download(hub_id, allow_patterns=list(patterns), etag_timeout=5, **options)
    except LocalEntryNotFoundError:
        raise InputError(
            f"model {hub_id}: no such folder, not all in the hub cache {where}, and the hub cannot be reached",
            hint=f"give a folder, or where there is a network: hf download {hub_id}",
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise InputError(
            f"model {hub_id}: no such folder, and not found on the hub: {type(error).__name__}",
            hint=f"check the spelling; a private or gated model needs HF_TOKEN and: hf download {hub_id}",
        ) from None
    return _checked_folder(Path(folder), hub_id)
