"""Weights to MXFP4 and back, in plain torch: E2M1 codes of four bits with one E8M0 scale byte per 32 columns of a row.

Legend: E experts, N output channels (rows), K input channels (columns) of one matrix.

Layout, which is that of gpt-oss's checkpoints: codes lie as in `four_bit_codes`; bit 3 of a code is the sign, bits 2 to
0 are the position in `E2M1_VALUES`; a scale byte s stands for 2**(s - 127), and 255 for not a number.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.four_bit_codes import CODES_PER_BYTE, check_weight, groups_of_rows, pack_pairs, unpack_pairs
from moe_optimizer.specs.expert_formats import MXFP4_GROUP

SCALE_GROUP = MXFP4_GROUP
"""Columns that share one scale."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PACKED_DTYPE = torch.uint8
"""Of the weights and of their scales."""

_SIGN, _ONE_SCALE, _NOT_A_NUMBER = 8, 127, 255
_E2M1_MAX_EXPONENT = 2
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -127, 125
"""Of a scale that is written: 8 times the largest would be infinite in float32."""
# Halfway between neighbours. Ties go to the even code: down from every other one, up from the rest.
_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(E2M1_VALUES))
# The largest magnitude of a group lies in [4, 8) for the middle one.
_CANDIDATES = (0, 1, -1)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of `weight` and the scale bytes of its groups.

    The scale of a group is the power of two that leaves the least sum of squared errors, of three: that which brings
    the largest magnitude into [4, 8), where magnitudes above 6 become 6, twice and half of it. Of equals the first.

    Args:
        weight: float32, bfloat16 or float16 [N, K] or [E, N, K], any strides, finite, K a multiple of 32.

    Returns:
        uint8 [.., N, K / 2] and uint8 [.., N, K / 32], contiguous: what `fused_experts` takes as weight and scale. A
        group of zeros has the scale 1.

    Raises:
        TensorContractError: another dtype, rank or K than these, or a value that is infinite or not a number.

    Numerics: values / scale is rounded to the nearest E2M1 number, ties to the even code. Groups of such numbers times
    one power of two are kept exactly. Magnitudes below 2**-128 become zero.
    Memory: the results and some 100 MB.
    """
    check_weight("quantize_mxfp4", weight, SCALE_GROUP)
    experts, (rows, columns) = weight.shape[0] if weight.dim() == 3 else 1, weight.shape[-2:]
    packed = torch.empty((experts, rows, columns // CODES_PER_BYTE), dtype=PACKED_DTYPE, device=weight.device)
    scale = torch.empty((experts, rows, columns // SCALE_GROUP), dtype=PACKED_DTYPE, device=weight.device)
    for part, groups in groups_of_rows("quantize_mxfp4", weight, SCALE_GROUP):
        packed[part], scale[part] = _quantize(groups)
    return (packed, scale) if weight.dim() == 3 else (packed[0], scale[0])


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights [.., N, K] in `dtype`, from codes and scale bytes as `quantize_mxfp4` returns them.

    Raises:
        TensorContractError: another dtype than uint8, or scales of another matrix.

    Numerics: float32, float64 and, but for scales at the ends of its range, bfloat16 hold every weight exactly.
    """
    expected = (*packed.shape[:-1], packed.shape[-1] * CODES_PER_BYTE // SCALE_GROUP)
    for name, tensor, shape in (("packed", packed, tuple(packed.shape)), ("scale", scale, expected)):
        if tensor.dtype != PACKED_DTYPE or tuple(tensor.shape) != shape:
            raise TensorContractError(
                f"dequantize_mxfp4: {name}: got {tensor.dtype} {list(tensor.shape)}, "
                f"expected {PACKED_DTYPE} {list(shape)}"
            )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    signed = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))
    table = torch.tensor(signed, dtype=exact, device=packed.device)
    groups = table[unpack_pairs(packed).int()].unflatten(-1, (-1, SCALE_GROUP))
    return (groups * _factors(scale, exact).unsqueeze(-1)).flatten(-2).to(dtype)


def _factors(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2**(s - 127), of which float32 holds the smallest as a subnormal number."""
    factors = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.int() - _ONE_SCALE)
    return torch.where(scale == _NOT_A_NUMBER, torch.nan, factors).to(dtype)


def _quantize(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n, K / 2] and scale bytes [n, K / 32] of float32 [n, K / 32, 32]."""
    magnitudes = groups.abs()
    largest = magnitudes.amax(-1)
    # frexp: largest = mantissa * 2**exponent with a mantissa in [0.5, 1).
    middle = torch.frexp(largest).exponent - 1 - _E2M1_MAX_EXPONENT
    boundaries = torch.tensor(_MIDDLES, dtype=torch.float32, device=groups.device)
    # What lies above the i-th boundary has a code above i; where a tie goes up, that is one step lower.
    boundaries[1::2] = torch.nextafter(boundaries[1::2], torch.zeros_like(boundaries[1::2]))
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=groups.device)
    best_error = torch.full_like(largest, torch.inf)
    best_scale = torch.full(largest.shape, _ONE_SCALE, dtype=torch.int32, device=groups.device)
    best_codes = torch.zeros(groups.shape, dtype=torch.int32, device=groups.device)
    for candidate in _CANDIDATES:
        exponent = (middle + candidate).clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
        scaled = torch.ldexp(magnitudes, -exponent.unsqueeze(-1))
        codes = torch.bucketize(scaled, boundaries, out_int32=True)
        # Relative to the group's largest: the squares of very small and very large weights keep to float32's range.
        error = ((table[codes] - scaled) * 2.0**candidate).square().sum(-1)
        better = (error < best_error) & (largest > 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, exponent.int() + _ONE_SCALE, best_scale)
        best_codes = torch.where(better.unsqueeze(-1), codes, best_codes)
    best_codes |= (groups < 0).int() * (best_codes > 0) * _SIGN
    return pack_pairs(best_codes.flatten(-2)), best_scale.to(PACKED_DTYPE)
