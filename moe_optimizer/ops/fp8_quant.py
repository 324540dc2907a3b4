"""Weights to FP8 (E4M3) with FP32 scales and back, in plain torch.

Legend: E experts, N output channels (rows), K input channels (columns) of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_optimizer.errors import KernelUnavailableError, TensorContractError
from moe_optimizer.ops.fp8_transformer_engine import quantize_with_transformer_engine, why_not_transformer_engine
from moe_optimizer.ops.reference import SCALE_BLOCK

Granularity = Literal["block", "channel"]
Quantizer = Literal["builtin", "transformer_engine"]

E4M3_MAX = 448.0
"""Largest finite E4M3 number."""
_MAGNITUDE_BITS, _LARGEST_BITS = 0x7F, 0x7E
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Chosen: the FP32 intermediate of one step. A whole layer of a large model would be another copy of it.
CHUNK_ELEMENTS = 8 * 1024 * 1024


def quantize_fp8(
    weight: Tensor, *, granularity: Granularity = "block", quantizer: Quantizer = "builtin"
) -> tuple[Tensor, Tensor]:
    """Return `weight` in E4M3 and the FP32 factors to multiply it with again.

    scale = (largest magnitude of the block or channel) / 448, or 1 where that is zero; quantized =
    weight / scale, rounded to the nearest E4M3 number (ties to even).

    Args:
        weight: float32, bfloat16 or float16 [N, K] or [E, N, K], any strides.
        granularity: "block": one scale per 128x128 block, those at the edges smaller;
            "channel": one scale per row.
        quantizer: "transformer_engine" has the same scales, up to FP32 rounding, for blocks of CUDA tensors.

    Returns:
        float8_e4m3fn of the same shape, contiguous; float32 scales [ceil(N/128), ceil(K/128)] or [N], with a
        leading E where `weight` has it: what `fused_experts` takes as w13_scale and w2_scale.

    Raises:
        TensorContractError: another dtype, rank or word than these, or a value that is infinite or not a number.
        KernelUnavailableError: Transformer Engine cannot convert this; the message says why.

    Numerics: |dequantized - weight| <= max(|weight| / 16, scale / 1024), up to FP32 rounding; a block or channel
    whose largest magnitude is below 2**-117 has a scale of 2**-126 and loses more.
    Memory: the results and some 64 MB.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TensorContractError(f"quantize_fp8: weight: got {weight.dtype}, expected float32, bfloat16 or float16")
    if weight.dim() not in (2, 3):
        raise TensorContractError(f"quantize_fp8: weight: got {weight.dim()} dimensions, expected 2 or 3")
    for name, word, known in (("granularity", granularity, Granularity), ("quantizer", quantizer, Quantizer)):
        if word not in get_args(known):
            raise TensorContractError(f"quantize_fp8: {name}: got {word!r}, expected {' or '.join(get_args(known))}")
    if quantizer == "transformer_engine":
        why_not = why_not_transformer_engine(weight.device, granularity=granularity)
        if why_not:
            raise KernelUnavailableError(f"quantize_fp8: Transformer Engine: {why_not}")
    matrices = weight if weight.dim() == 3 else weight.unsqueeze(0)
    size = _block_size(matrices, granularity)
    quantized = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(_scale_shape(matrices, granularity), dtype=torch.float32, device=weight.device)
    for matrix, target, factors in zip(matrices, quantized, scale, strict=True):
        if quantizer == "transformer_engine":
            _quantize_elsewhere(matrix, target, factors)
            continue
        for rows, blocks in _row_chunks(matrix.shape, size):
            factors[blocks] = _quantize_rows(matrix[rows], target[rows], size).view_as(factors[blocks])
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
    granularity: Granularity = "channel" if scale.dim() == 2 else "block"
    size, expected = _block_size(quantized, granularity), _scale_shape(quantized, granularity)
    if tuple(scale.shape) != expected:
        raise TensorContractError(f"dequantize_fp8: scale: got {tuple(scale.shape)}, expected {expected}")
    out = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    for matrix, target, factors in zip(quantized, out, scale, strict=True):
        for rows, blocks in _row_chunks(matrix.shape, size):
            values = _blocks(matrix[rows].float(), size)
            values.mul_(factors[blocks].view(values.shape[0], 1, values.shape[2], 1))
            target[rows] = _rows(values, matrix[rows].shape)
    return out


def saturated_share(*quantized: Tensor) -> float:
    """Return the share of E4M3 numbers whose magnitude is the largest one.

    With the scales of `quantize_fp8` a block or channel has one such number, as far as it has only one largest weight.

    Args:
        quantized: float8_e4m3fn [E, N, K].
    """
    largest = sum(
        int((matrix.view(torch.uint8) & _MAGNITUDE_BITS == _LARGEST_BITS).sum())
        for each in quantized
        for matrix in each
    )
    return largest / max(1, sum(each.numel() for each in quantized))


def _quantize_elsewhere(matrix: Tensor, target: Tensor, factors: Tensor) -> None:
    converted, scale = quantize_with_transformer_engine(matrix)
    target.copy_(converted)
    # What it makes of weights that are not finite is its own; here their scales tell.
    factors.copy_(scale if bool(torch.isfinite(matrix).all()) else torch.full_like(scale, torch.nan))


def _quantize_rows(matrix: Tensor, target: Tensor, size: tuple[int, int]) -> Tensor:
    """Write the quantised rows into `target` and return their scales, one for each block of `size`."""
    values = _blocks(matrix.float(), size)
    largest = torch.linalg.vector_norm(values, torch.inf, dim=(1, 3))
    scale = torch.where(largest == 0, 1.0, (largest / E4M3_MAX).clamp(min=_SMALLEST_SCALE))
    # A quotient can exceed 448 by one rounding; E4M3 has no infinity, the conversion would make it NaN.
    quotients = (values / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    target.copy_(_rows(quotients, matrix.shape))
    return scale


def _blocks(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Return [n, K], filled up with zeros to whole blocks, as [block rows, rows, block columns, columns]."""
    rows, columns = size
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _rows(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_blocks`."""
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)[: shape[0], : shape[1]]


def _block_size(matrices: Tensor, granularity: Granularity) -> tuple[int, int]:
    """Return rows and columns that share one scale."""
    return (SCALE_BLOCK, SCALE_BLOCK) if granularity == "block" else (1, max(1, matrices.shape[2]))


def _scale_shape(matrices: Tensor, granularity: Granularity) -> tuple[int, ...]:
    experts, rows, columns = matrices.shape
    if granularity == "channel":
        return experts, rows
    return experts, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)


def _row_chunks(shape: torch.Size, size: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of rows of about CHUNK_ELEMENTS and whole blocks, each with its range of block rows."""
    rows, columns = shape
    block_rows = max(1, CHUNK_ELEMENTS // max(1, columns * size[0]))
    for begin in range(0, -(-rows // size[0]), block_rows):
        end = begin + block_rows
        yield slice(begin * size[0], min(end * size[0], rows)), slice(begin, end)
