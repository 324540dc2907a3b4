"""Weights to FP8 (E4M3) with FP32 scales and back, in plain torch.

Legend: E experts, N output channels (rows), K input channels (columns) of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.reference import SCALE_BLOCK

Granularity = Literal["block", "channel"]

E4M3_MAX = 448.0
"""Largest finite E4M3 number."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Chosen: the FP32 intermediate of one step. A whole layer of a large model would be another copy of it.
_CHUNK_ELEMENTS = 8 * 1024 * 1024


def quantize_fp8(weight: Tensor, *, granularity: Granularity = "block") -> tuple[Tensor, Tensor]:
    """Return `weight` in E4M3 and the FP32 factors to multiply it with again.

    scale = (largest magnitude of the block or channel) / 448, or 1 where that is zero; quantized =
    weight / scale, rounded to the nearest E4M3 number (ties to even).

    Args:
        weight: float32, bfloat16 or float16 [N, K] or [E, N, K], any strides.
        granularity: "block": one scale per 128x128 block, those at the edges smaller;
            "channel": one scale per row.

    Returns:
        float8_e4m3fn of the same shape, contiguous; float32 scales [ceil(N/128), ceil(K/128)] or [N], with a
        leading E where `weight` has it: what `fused_experts` takes as w13_scale and w2_scale.

    Raises:
        TensorContractError: another dtype or rank, or a value that is infinite or not a number.

    Numerics: |dequantized - weight| <= max(|weight| / 16, scale / 1024), up to FP32 rounding; a block or channel
    whose largest magnitude is below 2**-117 has a scale of 2**-126 and loses more.
    Memory: the results and some 64 MB.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TensorContractError(f"quantize_fp8: weight: got {weight.dtype}, expected float32, bfloat16 or float16")
    if weight.dim() not in (2, 3):
        raise TensorContractError(f"quantize_fp8: weight: got {weight.dim()} dimensions, expected 2 or 3")
    matrices = weight if weight.dim() == 3 else weight.unsqueeze(0)
    quantized = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(_scale_shape(matrices, granularity), dtype=torch.float32, device=weight.device)
    for matrix, target, factors in zip(matrices, quantized, scale, strict=True):
        for rows in _row_chunks(*matrix.shape):
            _quantize_rows(matrix[rows], target[rows], factors[_scale_rows(rows, granularity)], granularity)
    if not bool(torch.isfinite(scale).all()):
        # An infinite or undefined weight makes its scale infinite or undefined: amax keeps both.
        bad = int(torch.nonzero(~torch.isfinite(scale.flatten(1)).all(-1))[0])
        where = f"expert {bad}" if weight.dim() == 3 else "the matrix"
        raise TensorContractError(f"quantize_fp8: weight: {where} has values that are infinite or not a number")
    return (quantized, scale) if weight.dim() == 3 else (quantized[0], scale[0])


def dequantize_fp8(quantized: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return quantized * scale in `dtype`; shapes as `quantize_fp8` returns them.

    Raises:
        TensorContractError: the scales have neither shape.
    """
    if quantized.dim() == 2:
        return dequantize_fp8(quantized.unsqueeze(0), scale.unsqueeze(0), dtype)[0]
    granularities: tuple[Granularity, ...] = ("block", "channel")
    expected = {granularity: _scale_shape(quantized, granularity) for granularity in granularities}
    granularity = next((name for name, shape in expected.items() if tuple(scale.shape) == shape), None)
    if granularity is None:
        shapes = " or ".join(str(shape) for shape in expected.values())
        raise TensorContractError(f"dequantize_fp8: scale: got {tuple(scale.shape)}, expected {shapes}")
    out = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    for matrix, target, factors in zip(quantized, out, scale, strict=True):
        for rows in _row_chunks(*matrix.shape):
            part = factors[_scale_rows(rows, granularity)]
            target[rows] = matrix[rows].float() * _spread(part, matrix[rows].shape, granularity)
    return out


def _quantize_rows(matrix: Tensor, target: Tensor, factors: Tensor, granularity: Granularity) -> None:
    values = matrix.float()
    largest = _block_amax(values) if granularity == "block" else values.abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, (largest / E4M3_MAX).clamp(min=_SMALLEST_SCALE))
    factors.copy_(scale)
    # A quotient can exceed 448 by one rounding; E4M3 has no infinity, the conversion would make it NaN.
    values = (values / _spread(scale, values.shape, granularity)).clamp_(-E4M3_MAX, E4M3_MAX)
    target.copy_(values.to(torch.float8_e4m3fn))


def _block_amax(values: Tensor) -> Tensor:
    """Return the largest magnitude of each 128x128 block of [n, K]."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    blocks = padded.view(padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, padded.shape[1] // SCALE_BLOCK, SCALE_BLOCK)
    return blocks.amax((1, 3))


def _spread(scale: Tensor, shape: torch.Size, granularity: Granularity) -> Tensor:
    """Return the scales as something that broadcasts against a matrix of `shape`."""
    if granularity == "channel":
        return scale[:, None]
    wide = scale.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def _scale_shape(matrices: Tensor, granularity: Granularity) -> tuple[int, ...]:
    experts, rows, columns = matrices.shape
    if granularity == "channel":
        return experts, rows
    return experts, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield row ranges of whole blocks, each of at most about _CHUNK_ELEMENTS."""
    step = max(1, _CHUNK_ELEMENTS // max(1, columns * SCALE_BLOCK)) * SCALE_BLOCK
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def _scale_rows(rows: slice, granularity: Granularity) -> slice:
    if granularity == "channel":
        return rows
    return slice(rows.start // SCALE_BLOCK, -(-rows.stop // SCALE_BLOCK))
