"""`paged_decode`: few requests' new tokens attend to the paged KV cache as vLLM keeps it, in one launch on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load, cuda_dispatch, reference
from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.registration import register_writing_op
from moe_optimizer.ops.tensor_check import TensorChecks

MAX_TOKENS = 8
"""Of the CUDA kernel (`kDecodeTokens` in csrc/include/moeopt/paged_decode.cuh)."""
MAX_QUERIES_PER_KV_HEAD = 16
"""Likewise (`kDecodeHeads`)."""
HEAD_SIZES = (64, 128)
"""Likewise."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def paged_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Return the attention of one query of each request to the keys that its row of the block table names.

    out[t, h] = softmax(scale q[t, h] . keys) @ values, of the KV head h // (H / K).

    T requests, H query heads, K key/value heads, d head size, B blocks of P keys, N columns of the table.

    Args:
        q: [T, H, d], last dimension contiguous.
        cache: dtype of q [B, K, P, 2 d], last dimension contiguous, else of any strides: a key with its value behind
            it, as vLLM's FlashAttention backend has them.
        block_table: int32 [T, N], last dimension contiguous. Key i of a request is in place i % P of block
            block_table[t, i // P]. What lies behind the request's length is not read.
        lengths: int32 [T], contiguous, 0 to N P: keys of each request, with its new one. With 0 the result is 0.
        scale: of the products.
        out: like q: written and returned. It must share memory with no other argument.
        new_keys: like q [T, K, d]: the last key of each request, which is stored in the cache too. None: it is there.
        new_values: like new_keys, and there where they are.
        slots: int64 [T], contiguous, there where new_keys are: block * P + place, where they are stored, the place of
            the last key; negative: nowhere.

    The launch before this one may write `q`, new keys and values, and each request's last key in the cache, nothing
    else of the arguments: the kernel reads the rest before that launch has ended (programmatic dependent launch).

    Raises:
        TensorContractError: an argument differs from the above. Lengths and blocks are checked only where no kernel
            computes.

    Numerics: float32 sums, weights rounded to the dtype of q for their product with values, one more rounding. The same
    bits each time for the same lengths. Limits of the CUDA kernel (`why_no_kernel`): bfloat16, 1 to 8 requests, d of 64
    or 128, up to 16 query heads of a KV head, P % 16 == 0; beyond them plain torch. Graph-capturable where the kernel
    computes, at any lengths: they are read on the device.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.ops.moe_optimizer.paged_decode_out(
        q, cache, block_table, lengths, scale, out, new_keys, new_values, slots
    )  # fmt: skip
    return out


def why_no_kernel(call: PagedDecode) -> str | None:
    """Return why the CUDA kernel does not cover the call, or None where it does. Reads no device data."""
    if not call.q.is_cuda:
        return f"the kernel of paged_decode runs on a GPU, q is on {call.q.device}"
    reason = cuda_dispatch.why_unavailable(call.q.device)
    if reason is not None:
        return reason
    if call.q.dtype != torch.bfloat16:
        return f"the kernel of paged_decode takes bfloat16, got {call.q.dtype}"
    try:
        _load.kernels().cuda_decode_layout(*call.call(1))
    except ValueError as error:
        return str(error)
    return None


def run_kernel(call: PagedDecode) -> None:
    """Enqueue the CUDA kernel on the current stream. Nothing is read back or waited for.

    Raises:
        UnsupportedError: the kernel does not cover the call.
        RuntimeError: CUDA refused the launch.
    """
    device, kernels = call.q.device, _load.kernels()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        layout = kernels.cuda_decode_layout(*call.call(multiprocessors))
    except ValueError as error:
        raise UnsupportedError(str(error)) from None
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        workspace = torch.empty(layout["workspace_bytes"], dtype=torch.uint8, device=device)
        arrived = cuda_dispatch.zeroed_words(device, stream)
        kernels.cuda_decode_run(*call.call(multiprocessors, workspace.data_ptr(), arrived.data_ptr()), stream)


def plain(call: PagedDecode) -> Tensor:
    """Return what the call computes, by plain torch, and store its new keys. Reads lengths and blocks on the host."""
    if call.new_keys is not None and call.new_values is not None and call.slots is not None:
        rows = (call.slots >= 0) & (call.lengths > 0)
        slots, block_size = call.slots[rows], call.cache.shape[2]
        stored = torch.cat((call.new_keys[rows], call.new_values[rows]), dim=-1)
        call.cache[slots // block_size, :, slots % block_size] = stored
    keys, values = call.cache.transpose(1, 2).chunk(2, dim=-1)
    return reference.paged_attention(call.q, keys, values, call.block_table, call.lengths, scale=call.scale)


def _check(call: PagedDecode) -> None:
    check = TensorChecks("paged_decode")
    q, cache, table, lengths, _, out, *new = call
    check.shape("q", q, "T", "H", "d")
    check.dtype("q", q, *_DTYPES)
    check.contiguous_rows("q", q)
    check.shape("cache", cache, "B", "K", "P", 2 * q.shape[2])
    check.dtype("cache", cache, q.dtype)
    if cache.stride(3) != 1:
        raise check.error("cache", "stride of the last dimension", cache.stride(3), "1")
    heads, kv_heads = q.shape[1], cache.shape[1]
    if not kv_heads or heads % kv_heads:
        raise check.error("cache", "dim 1 (K)", kv_heads, f"a divisor of {heads} (q dim 1)")
    if not cache.shape[2]:
        raise check.error("cache", "dim 2 (P)", 0, "at least 1")
    check.shape("block_table", table, "T", "N")
    check.dtype("block_table", table, torch.int32)
    check.contiguous_rows("block_table", table)
    check.shape("lengths", lengths, "T")
    check.dtype("lengths", lengths, torch.int32)
    check.contiguous_rows("lengths", lengths)
    check.shape("out", out, "T", "H", "d")
    check.dtype("out", out, q.dtype)
    check.contiguous_rows("out", out)
    names = ("new_keys", "new_values", "slots")
    if any(each is None for each in new) and not all(each is None for each in new):
        got = [name for name, each in zip(names, new, strict=True) if each is not None]
        raise check.error("new_keys, new_values and slots", "tensors", got, "all or none")
    for name, rows in zip(names, (call.new_keys, call.new_values), strict=False):
        if rows is not None:
            check.shape(name, rows, "T", kv_heads, "d")
            check.dtype(name, rows, q.dtype)
            check.contiguous_rows(name, rows)
    if call.slots is not None:
        check.shape("slots", call.slots, "T")
        check.dtype("slots", call.slots, torch.int64)
        check.contiguous_rows("slots", call.slots)
    others = {"cache": cache, "block_table": table, "lengths": lengths, "out": out}
    check.devices(others | dict(zip(names, new, strict=True)), q.device)


def _run(call: PagedDecode) -> None:
    if call.q.shape[0] == 0:
        return
    reason = why_no_kernel(call)
    if reason is None:
        run_kernel(call)
        return
    if call.q.is_cuda:
        _load.warn_of_reference("paged_decode", reason)
    call.out.copy_(plain(call))


register_writing_op(
    "paged_decode_out",
    "Tensor q, Tensor(a!) cache, Tensor block_table, Tensor lengths, float scale, Tensor(b!) out, "
    "Tensor? new_keys, Tensor? new_values, Tensor? slots",
    parse=PagedDecode,
    check=_check,
    run=_run,
)
