"""Dense weights in E4M3, and the products that quantise their tokens: vLLM's kernels, and torch's where vLLM is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
SCALES = ("tensor", "channel", "block")
"""What shares a scale: all of a weight, a row, 128 x 128."""


def quantised(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """Return a weight in E4M3 and its FP32 scales, as `skinny_gemm` takes them."""
    import torch

    rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (BLOCK, BLOCK)}[scales]
    blocks = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    padded = weight.new_zeros(blocks[0] * rows, blocks[1] * columns, dtype=torch.float)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    parts = padded.view(blocks[0], rows, blocks[1], columns)
    scale = parts.abs().amax((1, 3), keepdim=True) / 448
    whole = (parts / scale.clamp(min=1e-12)).view(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return whole.to(torch.float8_e4m3fn).contiguous(), scale[:, 0, :, 0].contiguous()


def stock_side(scales: str) -> str:
    """Return the name of the product that stock vLLM would run for few tokens, or of torch's where it is not installed.

    Scales of blocks: FlashInfer for less than 32 tokens, where it has that kernel, and DeepGEMM else.
    """
    if importlib.util.find_spec("vllm") is None:
        return "torch._scaled_mm"
    if scales != "block":
        return "cutlass_scaled_mm"
    from vllm.utils.flashinfer import is_flashinfer_fp8_blockscale_gemm_supported

    return "flashinfer" if is_flashinfer_fp8_blockscale_gemm_supported() else "deep_gemm"


def product(side: str) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return a product of BF16 tokens, an E4M3 weight, its scales and a bias, which quantises the tokens first."""
    return {
        "cutlass_scaled_mm": cutlass,
        "cutlass_block": cutlass_block,
        "deep_gemm": deep_gemm,
        "flashinfer": flashinfer,
        "torch._scaled_mm": scaled_mm,
    }[side]


def cutlass(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """vLLM's, scales of a tensor or of channels."""
    from vllm import _custom_ops as ops

    q, of_tokens = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return ops.cutlass_scaled_mm(q, w.t(), of_tokens, scale, x.dtype, bias)


def cutlass_block(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """vLLM's, scales of blocks."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    q, of_tokens = per_token_group_quant_fp8(x, BLOCK, column_major_scales=True)
    out = ops.cutlass_scaled_mm(q, w.t(), of_tokens, scale.t(), x.dtype)
    return out if bias is None else out + bias


def deep_gemm(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """DeepGEMM by vLLM, scales of blocks."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils import deep_gemm as kernels

    q, of_tokens = per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, use_ue8m0=False)
    out = x.new_empty(x.shape[0], w.shape[0])
    kernels.fp8_gemm_nt((q, of_tokens), (w, scale), out, is_deep_gemm_e8m0_used=False)
    return out if bias is None else out + bias


def flashinfer(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """FlashInfer by vLLM, scales of blocks; it rounds the tokens itself."""
    import torch
    from vllm.utils.flashinfer import flashinfer_fp8_blockscale_gemm

    out = flashinfer_fp8_blockscale_gemm(input=x, weight=w, weight_scale=scale, out_dtype=torch.bfloat16)
    return out if bias is None else out + bias


def scaled_mm(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's, one scale per token; scales of blocks are left to the largest: it is timed, not compared."""
    import torch

    of_tokens = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    q = (x / of_tokens).to(torch.float8_e4m3fn)
    of_rows = scale.amax(1).repeat_interleave(-(-w.shape[0] // scale.shape[0]))[: w.shape[0]]
    return torch._scaled_mm(q, w.t(), of_tokens, of_rows[None], bias, out_dtype=x.dtype)
