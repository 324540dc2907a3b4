"""The sizes of one MoE layer call, as every launch geometry needs them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSizes:
    """T tokens, k experts per token, E local experts, H hidden, I expert width, bytes of one stored weight."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    weight_bytes: int
    """2: BF16, 1: FP8 E4M3."""

    @property
    def num_pairs(self) -> int:
        """Token-expert pairs, T * k."""
        return self.num_tokens * self.top_k


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)
