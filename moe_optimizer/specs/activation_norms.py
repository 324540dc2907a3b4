"""Names what a file of activation norms holds: how large the inputs of the experts' matrices are, by column, on a text.

A safetensors file, FP32. H hidden size, E experts, I expert width:
    layers.N.x  [H]     norm of each column of layer N's input, over all tokens
    layers.N.h  [E, I]  norm of each column of an expert's activation, over the tokens routed to it
"""

from __future__ import annotations

from dataclasses import dataclass


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
