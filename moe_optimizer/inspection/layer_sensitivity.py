"""Reads a file of how much fewer bits change each layer."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.plan.json_codec import decode_text
from moe_optimizer.specs.layer_sensitivity import SCHEMA_VERSION, LayerSensitivity, LayerSensitivityFile

_MAX_FILE_BYTES = 1 << 20
"""Chosen: a hundred times what a model of 100 layers writes."""


def read_sensitivity_file(path: str | None, pass_name: str) -> LayerSensitivityFile | None:
    """Read the file that a profile names for a pass; None where it names none.

    Raises:
        InputError: it cannot be read, or is no such measurement; the message begins with the profile's key.
    """
    if path is None:
        return None
    try:
        text = read_text(Path(path), max_bytes=_MAX_FILE_BYTES)
        measured = decode_text(LayerSensitivity, text, origin=path, schema_version=SCHEMA_VERSION)
    except InputError as error:
        raise error.named_by(f"passes.{pass_name}.sensitivity") from None
    return LayerSensitivityFile(path=path, measured=measured)
