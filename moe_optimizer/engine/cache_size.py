"""`CacheSize`: how many blocks the KV cache has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Decided once the model is loaded and the memory that is left is known."""

    num_blocks: int
    """On the device."""
    num_host_blocks: int
    """In host memory, for sequences that are swapped out."""
    max_model_len: int
    """Longest sequence that the cache holds, at most what was asked for."""
