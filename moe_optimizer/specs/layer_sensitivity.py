"""Holds how much fewer bits in the experts change the output of each layer of a model on real text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from moe_optimizer.errors import InputError

SCHEMA_VERSION = 2

MeasuredWeights = Literal["fp8_block", "fp8_channel", "mxfp4", "int4_g32", "int4_g64", "int4_g128"]
"""What the experts are converted to: FP8 by the granularity of its scales, INT4 by the group that shares one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSensitivity:
    """One measurement of all MoE layers."""

    model: str
    """Name of the model's folder or hub id, without what is before the last slash."""
    weights: MeasuredWeights
    tokens: int
    """Calibration tokens."""
    errors: Mapping[int, float]
    """Decoder layer -> ||y_converted - y|| / ||y|| of its experts' output y over these tokens."""
    schema_version: Literal[2] = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Raise an InputError where there is no token or no layer, or an error is no number of at least 0."""
        if self.tokens < 1:
            raise InputError(f"tokens: got {self.tokens}, expected a whole number of at least 1")
        if not self.errors:
            raise InputError("errors: got no layer, expected one at least")
        for layer, error in self.errors.items():
            if not math.isfinite(error) or error < 0:
                raise InputError(f"errors.{layer}: got {error}, expected a number of at least 0")

    def to_json(self) -> str:
        """Return the file's text; `inspection.layer_sensitivity` reads it back."""
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSensitivityFile:
    """A measurement and where it was read."""

    path: str
    measured: LayerSensitivity
