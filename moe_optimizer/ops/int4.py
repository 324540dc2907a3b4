"""Weights to INT4 and back, in plain torch: codes of four bits, a scale and, if wanted, a zero point per group.

Legend: E experts, N output channels (rows), K input channels (columns) of one matrix, G columns that share a scale.

    weight[e, n, k] = (code[e, n, k] - zero[e, n, k // G]) * scale[e, n, k // G]

Codes lie as in `four_bit_codes`; codes and zero points are 0 to 15. What checkpoints store becomes this
layout in `int4_readers`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.four_bit_codes import CODES_PER_BYTE, check_weight, groups_of_rows, pack_pairs, unpack_pairs
from moe_optimizer.ops.tensor_check import TensorChecks
from moe_optimizer.specs.expert_formats import INT4_GROUPS

CODE_DTYPE = torch.uint8
"""Of the codes, two in an element, and of the zero points, one in an element."""
SCALE_DTYPES = (torch.bfloat16, torch.float16)
GROUPS = INT4_GROUPS
"""Columns that share a scale."""
SYMMETRIC_ZERO = 8
"""Of every group without zero points."""

_LARGEST_CODE = 15
# Chosen: shares of the scale that keeps the largest weight. A smaller one clips it and is finer for the others; below
# the last, no group of the normal distribution is better off.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


class Int4Weight(NamedTuple):
    """One weight of all experts, as the kernels read it; or one matrix of it, without the first dimension."""

    codes: Tensor
    """uint8 [E, N, K / 2]."""
    scale: Tensor
    """bfloat16 or float16, as the checkpoint has it, [E, N, K / G]. It is never converted: both are read exactly."""
    zero: Tensor | None = None
    """uint8 [E, N, K / G], 0 to 15; None: 8 everywhere."""

    @property
    def columns(self) -> int:
        """K."""
        return self.codes.shape[-1] * CODES_PER_BYTE

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 where the scale has none."""
        return self.columns // self.scale.shape[-1] if self.scale.shape[-1] else 0

    def expert(self, index: int) -> Int4Weight:
        """Return the matrix of one expert."""
        zero = None if self.zero is None else self.zero[index]
        return Int4Weight(self.codes[index], self.scale[index], zero)


def check_int4(
    check: TensorChecks, weight: Int4Weight, names: tuple[str, str, str] = ("codes", "scale", "zero")
) -> None:
    """Check that a weight is as `Int4Weight` says, one expert or several.

    Args:
        check: of the op.
        weight: what it was given.
        names: of the tensors, for the error.

    Raises:
        TensorContractError: it is not.
    """
    codes, scale, zero = weight
    check.dtype(names[0], codes, CODE_DTYPE)
    if codes.dim() not in (2, 3):
        raise check.error(names[0], "dimensions", list(codes.shape), "[N, K / 2] or [E, N, K / 2]")
    check.dtype(names[1], scale, *SCALE_DTYPES)
    groups = [weight.columns // group for group in GROUPS if weight.columns % group == 0]
    if not groups:
        raise check.error(names[0], "columns", weight.columns, f"a multiple of {GROUPS[0]}, which share a scale")
    check.shape(names[1], scale, *codes.shape[:-1], f"groups of {names[0]}")
    if scale.shape[-1] not in groups:
        raise check.error(names[1], f"dim {scale.dim() - 1}", scale.shape[-1], " or ".join(map(str, groups)))
    if zero is not None:
        check.dtype(names[2], zero, CODE_DTYPE)
        check.shape(names[2], zero, *scale.shape)


def quantize_int4(
    weight: Tensor, group: int, *, zero_points: bool = False, scale_dtype: torch.dtype = torch.bfloat16
) -> Int4Weight:
    """Return `weight` in INT4.

    The scale of a group is the one of eight that leaves the least sum of squared errors: that which brings the largest
    magnitude to 7 (with zero points: the range of the weights and 0 to 15), and down to 0.65 of it, where what lies
    beyond the codes becomes the outermost code. Of equals the first.

    Args:
        weight: float32, bfloat16 or float16 [N, K] or [E, N, K], any strides, finite, K a multiple of `group`.
        group: 32, 64 or 128.
        zero_points: with a zero point per group, for weights that do not lie around 0. A group's range always holds 0.
        scale_dtype: bfloat16 or float16.

    Returns:
        Contiguous codes and scales [.., N, K / group]. A group of zeros has the scale 1.

    Raises:
        TensorContractError: another dtype, rank, K or group than these, or a value that is infinite or not a number.

    Numerics: codes are the nearest to weight / scale + zero, ties to the even code, for the scale as it is stored.
    Memory: the results and some 100 MB.
    """
    if scale_dtype not in SCALE_DTYPES:
        raise TensorContractError(f"quantize_int4: scale_dtype: got {scale_dtype}, expected bfloat16 or float16")
    if group not in GROUPS:
        raise TensorContractError(f"quantize_int4: group: got {group}, expected one of {', '.join(map(str, GROUPS))}")
    check_weight("quantize_int4", weight, group)
    experts, (rows, columns) = weight.shape[0] if weight.dim() == 3 else 1, weight.shape[-2:]
    codes = torch.empty((experts, rows, columns // CODES_PER_BYTE), dtype=CODE_DTYPE, device=weight.device)
    scale = torch.empty((experts, rows, columns // group), dtype=scale_dtype, device=weight.device)
    zero = torch.empty(scale.shape, dtype=CODE_DTYPE, device=weight.device)
    for part, groups in groups_of_rows("quantize_int4", weight, group):
        codes[part], scale[part], zero[part] = _quantize(groups, zero_points, scale_dtype)
    result = Int4Weight(codes, scale, zero if zero_points else None)
    return result if weight.dim() == 3 else result.expert(0)


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights [.., N, K] in `dtype`.

    Raises:
        TensorContractError: the tensors are not as `Int4Weight` says.

    Numerics: float32 and float64 hold every weight exactly: a difference of at most 15 times 11 bits of a scale.
    """
    check_int4(TensorChecks("dequantize_int4"), weight)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    codes = unpack_pairs(weight.codes).unflatten(-1, (-1, weight.group)).to(exact)
    zero = SYMMETRIC_ZERO if weight.zero is None else weight.zero.unsqueeze(-1).to(exact)
    return ((codes - zero) * weight.scale.unsqueeze(-1).to(exact)).flatten(-2).to(dtype)


def _quantize(groups: Tensor, zero_points: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes [n, K / 2], scales and zero points [n, K / G] of float32 [n, K / G, G]."""
    if zero_points:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        whole = (high - low) / _LARGEST_CODE
    else:
        low = torch.zeros_like(groups[..., 0])
        whole = groups.abs().amax(-1) / (SYMMETRIC_ZERO - 1)
    # 15 times the largest scale is finite in float32.
    smallest = torch.finfo(scale_dtype).tiny
    largest = min(torch.finfo(scale_dtype).max, torch.finfo(torch.float32).max / (_LARGEST_CODE + 1))
    best_error = torch.full_like(whole, torch.inf)
    best_scale = torch.ones_like(whole, dtype=scale_dtype)
    best_zero = torch.full_like(whole, SYMMETRIC_ZERO)
    best_codes = torch.full_like(groups, SYMMETRIC_ZERO)
    for share in _SHARES:
        scale = (whole * share).clamp(smallest, largest).to(scale_dtype)
        factor = scale.float().unsqueeze(-1)
        zero = (-low / factor[..., 0]).round().clamp(0, _LARGEST_CODE) if zero_points else best_zero
        codes = (groups / factor + zero.unsqueeze(-1)).round().clamp(0, _LARGEST_CODE)
        # Relative to the group's range: the squares of very small and very large weights keep to float32's range.
        relative = factor / whole.unsqueeze(-1)
        error = ((codes - zero.unsqueeze(-1) - groups / factor) * relative).square().sum(-1)
        better = (error < best_error) & (whole > 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better.unsqueeze(-1), codes, best_codes)
        best_zero = torch.where(better, zero, best_zero)
    return pack_pairs(best_codes.flatten(-2)), best_scale, best_zero.to(CODE_DTYPE)
