"""Reads the header of a file of activation norms."""

from __future__ import annotations

import re
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.safetensors_header import read_header
from moe_optimizer.specs.activation_norms import ActivationNormsFile, hidden_norms_name, input_norms_name

PROFILE_KEY = "passes.sparsity_24.activation_norms"
_INPUT_NORMS = re.compile(r"layers\.(\d{1,4})\.x")
_MAX_HEADER_BYTES = 1 << 20
"""Chosen: ten times what a model of 1000 layers needs."""


def read_activation_norms_file(path: str | None) -> ActivationNormsFile | None:
    """Read the header of the file that a profile names; None where it names none.

    Raises:
        InputError: it cannot be read, or is no such file; the message begins with the profile's key.
    """
    if path is None:
        return None
    name = f"{PROFILE_KEY}: {path}"
    header, _, _ = read_header(Path(path), max_bytes=_MAX_HEADER_BYTES, name=name)
    metadata = header.pop("__metadata__", None)
    metadata = metadata if isinstance(metadata, dict) else {}
    model, tokens = metadata.get("model"), metadata.get("tokens")
    if not isinstance(model, str) or not isinstance(tokens, str) or not tokens.isdecimal():
        raise InputError(f"{name}: metadata: expected model and tokens, got {sorted(metadata)!r:.80}")
    layers = tuple(sorted(int(found[1]) for tensor in header if (found := _INPUT_NORMS.fullmatch(tensor))))
    wanted = {name_of(layer) for layer in layers for name_of in (input_norms_name, hidden_norms_name)}
    if not layers or set(header) != wanted:
        raise InputError(f"{name}: expected the tensors layers.N.x and layers.N.h of every layer")
    return ActivationNormsFile(path=path, model=model, tokens=int(tokens), layers=layers)
