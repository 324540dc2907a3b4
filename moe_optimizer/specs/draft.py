"""Holds what a drafting model is, as far as speculation needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A model that drafts tokens for another."""

    name: str
    """What the user named: a hub id or a folder."""
    path: str
    """What vLLM is given."""
    method: Literal["eagle3", "draft"]
    """eagle3: layers on the hidden states of the served model; draft: a language model of its own."""
    vocab_size: int
    num_layers: int
    weight_bytes: int
    """Of all its weights; 0: its files are not here."""
    kv_bytes_per_token: int
    """Cache bytes of one more token, all layers, at 2 bytes an element."""
