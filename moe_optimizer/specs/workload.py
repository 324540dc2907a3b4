"""Holds what the server is expected to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The load that a plan is made for. All fields are wishes from the profile or flags, not measurements."""

    batch_size: int
    """Requests decoded at the same time."""
    input_tokens: int
    """Typical prompt length."""
    output_tokens: int
    """Typical completion length."""
    max_model_len: int | None
    """Longest sequence (prompt and completion) to serve; None: the model's own, as far as memory allows."""
