"""Checks the files of a model for the doctor: present, readable and whole. Reads headers, never weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from moe_optimizer.cli.check import Check
from moe_optimizer.errors import MoeOptimizerError

_DOWNLOAD = "download the model again"


def model_checks(model: str) -> Iterator[Check]:
    """Yield the checks of configuration, tokenizer, chat template and weights of one model."""
    from moe_optimizer.inspection.hub import resolve_model
    from moe_optimizer.inspection.model_inspector import ModelInspector

    try:
        folder = resolve_model(model)
        # The model's own code is not run here, so its presence is no reason to stop.
        spec = ModelInspector(trust_remote_code=True).inspect(model)
    except MoeOptimizerError as error:
        yield Check("model", "missing", str(error), error.hint)
        return
    experts = f"{spec.num_experts} experts" if spec.is_moe else "dense"
    yield Check("model", "ok", f"config.json of {folder}: {spec.architecture or spec.model_type}, {experts}")
    if spec.servable is False:
        yield Check("model", "missing", spec.servable_reason)
    yield _tokenizer(folder)
    yield _chat_template(folder)
    yield _weights(folder)


def _tokenizer(folder: Path) -> Check:
    from moe_optimizer.inspection.tokenizer_files import find_tokenizer

    try:
        names = find_tokenizer(folder)
    except MoeOptimizerError as error:
        return Check("tokenizer", "missing", str(error), error.hint or _DOWNLOAD)
    if not names:
        return Check("tokenizer", "missing", "no tokenizer.json, tokenizer.model or other vocabulary", _DOWNLOAD)
    return Check("tokenizer", "ok", ", ".join(names))


def _chat_template(folder: Path) -> Check:
    from moe_optimizer.inspection.json_file import read_json_object

    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return Check("chat template", "ok", name)
    try:
        config = read_json_object(folder / "tokenizer_config.json")
    except MoeOptimizerError:
        config = {}
    if config.get("chat_template"):
        return Check("chat template", "ok", "tokenizer_config.json")
    return Check("chat template", "note", "none: /v1/chat/completions refuses requests",
                 "name one with: -- --chat-template FILE")  # fmt: skip


def _weights(folder: Path) -> Check:
    from moe_optimizer.inspection.safetensors_header import read_files, read_tensors
    from moe_optimizer.inspection.weight_files import first_unlisted, missing_weights

    try:
        missing, tensors = missing_weights(folder), read_tensors(folder) or ()
        if missing:
            return Check("weights", "missing", missing, _DOWNLOAD)
        # Includes files that vLLM does not load: the same weights in another program's layout.
        files = sorted(folder.glob("*.safetensors"))
        deque(read_files(files), maxlen=0)
        problem = first_unlisted(folder, {tensor.name for tensor in tensors})
    except MoeOptimizerError as error:
        return Check("weights", "missing", str(error), error.hint or _DOWNLOAD)
    if problem:
        return Check("weights", "missing", problem, _DOWNLOAD)
    size = sum(tensor.num_bytes for tensor in tensors)
    return Check(
        "weights", "ok", f"{len(tensors)} tensors, {size / 1e9:.3g} GB in {len(files)} files, every file whole"
    )
