"""`skinny_gemm`: the product of few tokens with a weight matrix, which reads the weights as fast as a GPU can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load, cuda_dispatch
from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from moe_optimizer.ops.registration import register_result_op
from moe_optimizer.ops.tensor_check import TensorChecks

MAX_TOKENS = 8
"""Of the CUDA kernel (`kSkinnyTokens` in csrc/include/moeopt/skinny_gemm.cuh)."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def skinny_gemm(x: Tensor, w: Tensor, bias: Tensor | None = None, *, max_tokens: int = MAX_TOKENS) -> Tensor:
    """Return x w^T + bias: [T, N], dtype of x.

    T tokens, K inputs, N outputs.

    Args:
        x: [T, K], last dimension contiguous.
        w: [N, K], dtype of x, last dimension contiguous. The launch before this one must not write it: it is read
            before that one has ended (programmatic dependent launch).
        bias: [N], dtype of x.
        max_tokens: T up to which the kernel computes; beyond, `torch.nn.functional.linear`.

    Raises:
        TensorContractError: an argument differs from the above.

    Numerics: float32 sums in a fixed order, bias added, rounded once. A token's bits depend on nothing beside it, as
    long as the kernel computes. Limits of the CUDA kernel (`why_no_kernel`): bfloat16, 1 to 8 tokens, K % 32 == 0,
    contiguous w; beyond them `linear`. Graph-capturable.
    """
    return torch.ops.moe_optimizer.skinny_gemm(x, w, bias, max_tokens)


def why_no_kernel(call: SkinnyGemm) -> str | None:
    """Return why the CUDA kernel does not cover the call, or None where it does. Reads no device data."""
    if not call.x.is_cuda:
        return f"the kernel of skinny_gemm runs on a GPU, x is on {call.x.device}"
    reason = cuda_dispatch.why_unavailable(call.x.device)
    if reason is not None:
        return reason
    if call.x.dtype != torch.bfloat16:
        return f"the kernel of skinny_gemm takes bfloat16, got {call.x.dtype}"
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


def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product by the CUDA kernel; the arguments are those of a call that it covers."""
    out = _result(x, w)
    run_kernel(SkinnyGemm(x, w, bias, out))
    return out


def _check(x: Tensor, w: Tensor, bias: Tensor | None, max_tokens: int) -> None:
    check = TensorChecks("skinny_gemm")
    check.shape("x", x, "T", "K")
    check.dtype("x", x, *_DTYPES)
    check.contiguous_rows("x", x)
    check.shape("w", w, "N", "K")
    check.dtype("w", w, x.dtype)
    check.contiguous_rows("w", w)
    if bias is not None:
        check.shape("bias", bias, "N")
        check.dtype("bias", bias, x.dtype)
        check.contiguous_rows("bias", bias)
    if not 0 <= max_tokens <= MAX_TOKENS:
        raise check.error("max_tokens", "number", max_tokens, f"0 to {MAX_TOKENS}")
    check.devices({"w": w, "bias": bias}, x.device)


def _run(x: Tensor, w: Tensor, bias: Tensor | None, max_tokens: int) -> Tensor:
    if 0 < x.shape[0] <= max_tokens:
        reason = why_no_kernel(SkinnyGemm(x, w, bias, x))
        if reason is None:
            return multiply(x, w, bias)
        if x.is_cuda:
            _load.warn_of_reference("skinny_gemm", reason)
    return torch.nn.functional.linear(x, w, bias)


def _result(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)


register_result_op(
    "skinny_gemm",
    "Tensor x, Tensor w, Tensor? bias, int max_tokens",
    check=_check,
    run=_run,
    result=_result,
)
