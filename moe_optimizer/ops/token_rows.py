"""What a decoder layer does with its tokens between the products, on CPUs in one pass: norms, rotations, storing.

Each function returns False or None, with nothing done, where torch has to do it: another device or dtype, a graph that
is traced, strides that the compiled module does not read, no compiled module, a torch before 2.10. The norms' sums are
in another order than torch's, so 16-bit dtypes, which agree with transformers bit for bit, are left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.ops import _load


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Return weight * sum / sqrt(mean(sum^2) + eps), and sum = x + residual; float32 alone."""
    if not _computes(x_TH):
        return None
    out_TH, sum_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    return (out_TH, sum_TH) if _compiled().add_rms_norm(x_TH, residual_TH, weight_H, eps, sum_TH, out_TH) else None


def turn_heads(
    x_TNd: Tensor, num_heads: int, rope: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor] | None, eps: float
) -> bool:
    """Normalize each head of queries and keys by its weight [d], if there are weights, and turn it; float32 alone.

    In place: of the heads in x the first `num_heads` are queries'. `rope`: cosines and sines, [T, 1, d] each.
    """
    if not _computes(x_TNd):
        return False
    q_weight, k_weight = weights or (None, None)
    return _compiled().turn_heads(x_TNd, num_heads, q_weight, k_weight, eps, *rope)


def store_rows(source_TKd: Tensor, slots_T: Tensor, target_BSKd: Tensor) -> bool:
    """Copy the row of each token to its slot: block * block size + place in the block; -1 is not copied. Any dtype."""
    return _reads(source_TKd) and _compiled().store_rows(source_TKd, slots_T, target_BSKd)


def _computes(x: Tensor) -> bool:
    return x.dtype is torch.float32 and _reads(x)


def _reads(x: Tensor) -> bool:
    return x.is_cpu and not torch.compiler.is_compiling() and _compiled() is not None


def _compiled() -> Any:
    return _load.calls("TokenRowCalls")
