"""How large the inputs of the experts' matrices are, column by column, on a text: the file's names and its header.

A safetensors file, FP32. H hidden size, E experts, I expert width:
    layers.N.x  [H]     norm of each column of layer N's input, over all tokens
    layers.N.h  [E, I]  norm of each column of an expert's activation, over the tokens routed to it
"""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError

PROFILE_KEY = "passes.sparsity_24.activation_norms"
_INPUT_NORMS = re.compile(r"layers\.(\d{1,4})\.x")
_MAX_HEADER_BYTES = 1 << 20
"""Chosen: ten times what a model of 1000 layers needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationNormsFile:
    """What the file's header says."""

    path: str
    """As the profile names it."""
    model: str
    """Name of the model's folder or hub id, without what is before the last slash."""
    tokens: int
    """Calibration tokens."""
    layers: tuple[int, ...]
    """Decoder layers, ascending."""


def input_norms_name(layer: int) -> str:
    """Return the tensor of the norms of a layer's input."""
    return f"layers.{layer}.x"


def hidden_norms_name(layer: int) -> str:
    """Return the tensor of the norms of what a layer's down projections read."""
    return f"layers.{layer}.h"


def read_activation_norms_file(path: str | None) -> ActivationNormsFile | None:
    """Read the header of the file that a profile names; None where it names none.

    Raises:
        InputError: it cannot be read, or is no such file; the message begins with the profile's key.
    """
    if path is None:
        return None
    try:
        return _read(path)
    except InputError as error:
        raise error.named_by(PROFILE_KEY) from None


def _read(path: str) -> ActivationNormsFile:
    header = _header(Path(path))
    metadata = header.pop("__metadata__", None)
    metadata = metadata if isinstance(metadata, dict) else {}
    model, tokens = metadata.get("model"), metadata.get("tokens")
    if not isinstance(model, str) or not isinstance(tokens, str) or not tokens.isdecimal():
        raise InputError(f"{path}: metadata: expected model and tokens, got {sorted(metadata)!r:.80}")
    layers = tuple(sorted(int(found[1]) for name in header if (found := _INPUT_NORMS.fullmatch(name))))
    wanted = {name(layer) for layer in layers for name in (input_norms_name, hidden_norms_name)}
    if not layers or set(header) != wanted:
        raise InputError(f"{path}: expected the tensors layers.N.x and layers.N.h of every layer")
    return ActivationNormsFile(path=path, model=model, tokens=int(tokens), layers=layers)


def _header(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # A pipe would wait for a writer.
            raise InputError(f"{path}: is not a regular file, expected activation norms")
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise InputError(f"{path}: not activation norms: a header of {length} bytes")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: not a safetensors file: its header is no object")
    return header
