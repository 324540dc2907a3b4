"""How much FP8 experts change the output of each layer of a model on real text: what was measured, and its file."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moe_optimizer.errors import InputError

SCHEMA_VERSION = 1
PROFILE_KEY = "passes.fp8.sensitivity"
_MAX_FILE_BYTES = 1 << 20
"""Chosen: a hundred times what a model of 100 layers writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Sensitivity:
    """One measurement of all MoE layers."""

    model: str
    """Name of the model's folder or hub id, without what is before the last slash."""
    granularity: Literal["block", "channel"]
    tokens: int
    """Calibration tokens."""
    errors: Mapping[int, float]
    """Decoder layer -> ||y_fp8 - y|| / ||y|| of its experts' output y over these tokens."""

    def to_json(self) -> str:
        """Return the file's text; `read_fp8_sensitivity` reads it back."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8SensitivityFile:
    """A measurement and where it was read."""

    path: str
    measured: Fp8Sensitivity


def read_sensitivity_file(path: str | None) -> Fp8SensitivityFile | None:
    """Read the file that a profile names; None where it names none.

    Raises:
        InputError: see `read_fp8_sensitivity`; the message begins with the profile's key.
    """
    if path is None:
        return None
    try:
        return Fp8SensitivityFile(path=path, measured=read_fp8_sensitivity(Path(path)))
    except InputError as error:
        raise error.named_by(PROFILE_KEY) from None


def read_fp8_sensitivity(path: Path) -> Fp8Sensitivity:
    """Read one file.

    Raises:
        InputError: it cannot be read, or is no such measurement; the message names the field.
    """
    try:
        data = json.loads(_text(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    expected = {"schema_version", "model", "granularity", "tokens", "errors"}
    if not isinstance(data, dict) or set(data) != expected:
        raise InputError(f"{path}: expected an object with the keys {', '.join(sorted(expected))}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{path}: schema_version: got {data['schema_version']!r:.40}, expected {SCHEMA_VERSION}")
    if not isinstance(data["model"], str):
        raise InputError(f"{path}: model: got {data['model']!r:.80}, expected a text")
    if data["granularity"] not in ("block", "channel"):
        raise InputError(f"{path}: granularity: got {data['granularity']!r:.80}, expected block or channel")
    if not isinstance(data["tokens"], int) or data["tokens"] < 1:
        raise InputError(f"{path}: tokens: got {data['tokens']!r:.80}, expected a whole number of at least 1")
    return Fp8Sensitivity(
        model=data["model"],
        granularity=data["granularity"],
        tokens=data["tokens"],
        errors=_errors(data["errors"], path),
    )


def _text(path: Path) -> str:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        # A pipe would wait for a writer, a device may never end.
        raise InputError(f"{path}: is not a regular file, expected an FP8 sensitivity in JSON")
    if status.st_size > _MAX_FILE_BYTES:
        raise InputError(f"{path}: {status.st_size} bytes are too many for an FP8 sensitivity")
    return path.read_text(encoding="utf-8")


def _errors(value: Any, path: Path) -> dict[int, float]:
    if not isinstance(value, dict) or not value:
        raise InputError(f"{path}: errors: expected an object of layers")
    errors = {}
    for layer, error in value.items():
        if not layer.isdecimal() or len(layer) > 4:
            raise InputError(f"{path}: errors: got layer {layer!r:.40}, expected a number")
        if isinstance(error, bool) or not isinstance(error, int | float) or not math.isfinite(error) or error < 0:
            raise InputError(f"{path}: errors: layer {layer}: got {error!r:.40}, expected a number of at least 0")
        errors[int(layer)] = float(error)
    return errors
