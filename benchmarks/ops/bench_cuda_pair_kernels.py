"""Small Triton kernels around a grouped GEMM of somebody else: SwiGLU, rounding to E4M3, the sum by token."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

GROUP = 128
"""Values of a row that share a scale."""


def combine(y: Tensor, rows: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """out[t] = sum of weights[t, k] * y[rows[t, k]], added in FP32."""
    tokens, top_k = weights.shape
    columns = out.shape[1]
    _combine[(tokens, triton.cdiv(columns, 1024))](y, rows, weights, out, columns, TOP_K=top_k, BLOCK=1024)
    return out


def silu_and_mul(gate_up: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """out[r] = silu(gate_up[r, :I]) * gate_up[r, I:] for the rows of pairs."""
    width = out.shape[-1]
    grid = (rows.numel(), triton.cdiv(width, 512))
    _silu_and_mul[grid](gate_up, rows, out, width, BLOCK=512)
    return out


@dataclass(frozen=True)
class ScaledRows:
    """E4M3 rows with a scale per row and GROUP values, the scales of neighbouring rows beside each other."""

    values: Tensor
    scales: Tensor
    scale_offsets: Tensor
    """int64 [pairs], by pair: where its first scale lies in the storage."""
    scale_step: int
    """From a scale to the next of its row."""


def quantize_tokens(x: Tensor, top_k: int, rows: Tensor, to: ScaledRows) -> None:
    """Round the token of each pair into its row."""
    grid = (rows.numel(), x.shape[1] // GROUP)
    _quantize[grid](x, x, rows, to.values, to.scales, to.scale_offsets, to.scale_step, x.shape[1], x.shape[1],
                    TOP_K=top_k, GATED=False, GROUP=GROUP)  # fmt: skip


def quantize_silu_and_mul(gate_up: Tensor, rows: Tensor, to: ScaledRows) -> None:
    """Round silu(gate) * up of each pair's row into the same row."""
    width = to.values.shape[-1]
    grid = (rows.numel(), width // GROUP)
    up = gate_up.flatten()[width:]
    _quantize[grid](gate_up, up, rows, to.values, to.scales, to.scale_offsets, to.scale_step, width, 2 * width,
                    TOP_K=1, GATED=True, GROUP=GROUP)  # fmt: skip


@triton.jit
def _combine(  # noqa: PLR0917
    y,
    rows,
    weights,
    out,
    columns,
    TOP_K: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(TOP_K):
        row = tl.load(rows + token * TOP_K + k)
        weight = tl.load(weights + token * TOP_K + k)
        total += weight * tl.load(y + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _silu_and_mul(gate_up, rows, out, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.load(rows + tl.program_id(0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize(  # noqa: PLR0917
    first, second, rows, values, scales, scale_offsets, scale_step, width, step,
    TOP_K: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    pair = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.load(rows + pair)
    column = group * GROUP + tl.arange(0, GROUP)
    if GATED:
        gate = tl.load(first + row * step + column).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * tl.load(second + row * step + column).to(tl.float32)
    else:
        value = tl.load(first + (pair // TOP_K).to(tl.int64) * step + column).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / 448.0
    tl.store(values + row * width + column, (value / scale).to(values.dtype.element_ty))
    tl.store(scales + tl.load(scale_offsets + pair) + group * scale_step, scale)
