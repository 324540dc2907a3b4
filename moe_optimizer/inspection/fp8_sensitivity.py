"""Reads a file of measured FP8 sensitivities."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.plan.json_codec import decode_text
from moe_optimizer.specs.fp8_sensitivity import SCHEMA_VERSION, Fp8Sensitivity, Fp8SensitivityFile

PROFILE_KEY = "passes.fp8.sensitivity"
_MAX_FILE_BYTES = 1 << 20
"""Chosen: a hundred times what a model of 100 layers writes."""


def read_sensitivity_file(path: str | None) -> Fp8SensitivityFile | None:
    """Read the file that a profile names; None where it names none.

    Raises:
        InputError: it cannot be read, or is no such measurement; the message begins with the profile's key.
    """
    if path is None:
        return None
    try:
        text = read_text(Path(path), max_bytes=_MAX_FILE_BYTES)
        measured = decode_text(Fp8Sensitivity, text, origin=path, schema_version=SCHEMA_VERSION)
    except InputError as error:
        raise error.named_by(PROFILE_KEY) from None
    return Fp8SensitivityFile(path=path, measured=measured)
