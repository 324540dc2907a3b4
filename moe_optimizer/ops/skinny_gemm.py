"""`skinny_gemm`: the product of few tokens with a weight matrix, which reads the weights as fast as a GPU can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load, cuda_dispatch
from moe_optimizer.ops.kernel_arguments import SkinnyGemm, is_of_rows
from moe_optimizer.ops.reference import SCALE_BLOCK, dequantize
from moe_optimizer.ops.registration import register_result_op
from moe_optimizer.ops.tensor_check import TensorChecks

MAX_TOKENS = 8
"""Of the CUDA kernel (`kSkinnyTokens` in csrc/include/moeopt/skinny_gemm.cuh)."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def skinny_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None, max_tokens: int = MAX_TOKENS
) -> Tensor:
    """Return x w^T + bias: [T, N], dtype of x.

    T tokens, K inputs, N outputs.

    Args:
        x: [T, K], last dimension contiguous. It is not quantised, whatever w is.
        w: [N, K], dtype of x, or float8_e4m3fn with `scale`; last dimension contiguous. The launch before this one
            must not write it, nor its scales: they are read before that one has ended (programmatic dependent launch).
        bias: [N], dtype of x.
        scale: float32, what values of a float8_e4m3fn w are multiplied by: one number; or one per output, [N] or
            [N, 1]; or one per block of 128 outputs x 128 inputs, [ceil(N / 128), ceil(K / 128)], strides of any size.
        max_tokens: T up to which the kernel computes; beyond, plain torch.

    Raises:
        TensorContractError: an argument differs from the above.

    Numerics: float32 sums in a fixed order, scaled in float32, bias added, rounded once; weights are exact. A token's
    bits depend on nothing beside it, as long as the kernel computes. Limits of the CUDA kernel (`why_no_kernel`):
    bfloat16 x, 1 to 8 tokens, K % 32 == 0 (float8_e4m3fn: 64), contiguous w; beyond them `torch.nn.functional.linear`,
    of float8_e4m3fn in float32. Graph-capturable.
    """
    return torch.ops.moe_optimizer.skinny_gemm(x, w, bias, scale, max_tokens)


def why_no_kernel(call: SkinnyGemm) -> str | None:
    """Return why the CUDA kernel does not cover the call, or None where it does. Reads no device data."""
    if not call.x.is_cuda:
        return f"the kernel of skinny_gemm runs on a GPU, x is on {call.x.device}"
    reason = cuda_dispatch.why_unavailable(call.x.device)
    if reason is not None:
        return reason
    if call.x.dtype != torch.bfloat16:
        return f"the kernel of skinny_gemm takes bfloat16 tokens, got {call.x.dtype}"
    if not call.w.is_contiguous():
        return f"the kernel of skinny_gemm takes a contiguous weight, got strides {list(call.w.stride())}"
    try:
        _load.kernels().cuda_skinny_layout(*call.call(1))
    except ValueError as error:
        return str(error)
    return None


def run_kernel(call: SkinnyGemm) -> None:
    """Enqueue the CUDA kernel on the current stream. Nothing is allocated, read back or waited for.

    Raises:
        UnsupportedError: the kernel does not cover the call.
        RuntimeError: CUDA refused the launch.
    """
    device = call.x.device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        try:
            _load.kernels().cuda_skinny_run(*call.call(multiprocessors), stream)
        except ValueError as error:
            raise UnsupportedError(str(error)) from None


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Return the product by the CUDA kernel; the arguments are those of a call that it covers."""
    out = _result(x, w)
    run_kernel(SkinnyGemm(x, w, bias, out, scale))
    return out


def _check(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None, max_tokens: int) -> None:
    check = TensorChecks("skinny_gemm")
    check.shape("x", x, "T", "K")
    check.dtype("x", x, *_DTYPES)
    check.contiguous_rows("x", x)
    check.shape("w", w, "N", "K")
    check.dtype("w", w, x.dtype if scale is None else torch.float8_e4m3fn)
    check.contiguous_rows("w", w)
    if scale is not None:
        _check_scale(check, w, scale)
    if bias is not None:
        check.shape("bias", bias, "N")
        check.dtype("bias", bias, x.dtype)
        check.contiguous_rows("bias", bias)
    if not 0 <= max_tokens <= MAX_TOKENS:
        raise check.error("max_tokens", "number", max_tokens, f"0 to {MAX_TOKENS}")
    check.devices({"w": w, "bias": bias, "scale": scale}, x.device)


def _check_scale(check: TensorChecks, w: Tensor, scale: Tensor) -> None:
    check.dtype("scale", scale, torch.float32)
    if scale.numel() == 1:
        return
    if scale.dim() == 1:
        check.shape("scale", scale, "N")
    elif scale.dim() != 2 or not is_of_rows(w, scale):
        check.shape("scale", scale, *(-(-size // SCALE_BLOCK) for size in w.shape))


def _run(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None, max_tokens: int) -> Tensor:
    if 0 < x.shape[0] <= max_tokens:
        reason = why_no_kernel(SkinnyGemm(x, w, bias, x, scale))
        if reason is None:
            return multiply(x, w, bias, scale)
        if x.is_cuda:
            _load.warn_of_reference("skinny_gemm", reason)
    if scale is None:
        return torch.nn.functional.linear(x, w, bias)
    whole = torch.nn.functional.linear(x.float(), dequantized(w, scale), None if bias is None else bias.float())
    return whole.to(x.dtype)


def dequantized(w: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 weight that a float8_e4m3fn one stands for."""
    if scale.numel() == 1:
        return w.float() * scale.reshape(())
    return dequantize(w[None], scale.reshape(1, -1) if is_of_rows(w, scale) else scale[None], 0, torch.float32)


def _result(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)


register_result_op(
    "skinny_gemm",
    "Tensor x, Tensor w, Tensor? bias, Tensor? scale, int max_tokens",
    check=_check,
    run=_run,
    result=_result,
)
