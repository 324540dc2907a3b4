"""`paged_attention`: one query per sequence attends to its keys and values where the paged KV cache holds them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load, reference
from moe_optimizer.ops.kernel_arguments import DTYPE_CODE
from moe_optimizer.ops.registration import register_op
from moe_optimizer.ops.tensor_check import TensorChecks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AttentionInputs(NamedTuple):
    """The inputs of the registered ops, in the order of their schema."""

    q: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    context_lengths: Tensor


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention of one query per sequence over the blocks that its table names.

    Meaning: `reference.paged_attention`. S sequences, H query heads, K key/value heads, d head size, B blocks of P
    tokens, N columns of the tables. Query head h reads key/value head h // (H / K). CPU only.

    Args:
        q: float32, bfloat16 or float16 [S, H, d], last dimension contiguous.
        keys: as q [B, P, K, d], contiguous; K divides H.
        values: like keys.
        block_tables: int32 [S, N], last dimension contiguous. Token i of a sequence is in place i % P of block
            block_tables[s, i // P]. What lies behind the context is not read.
        context_lengths: int64 [S], contiguous, 0 to N * P: tokens that the query attends to. With 0 the result is 0.
        out: like q, of any strides but the last dimension's: written and returned. It must not share memory with q.

    Returns:
        `out`, or a new tensor.

    Raises:
        TensorContractError: a shape, dtype, device, stride or value differs from the above.

    Numerics: float32 throughout, rounded once to the dtype of q; not a number where a score or a value is none.
    The result of a sequence depends neither on the others nor on the number of threads, bit for bit.
    Limits: without compiled kernels it runs in plain torch, with a warning once.
    """
    inputs = AttentionInputs(q, keys, values, block_tables, context_lengths)
    if out is None:
        return torch.ops.moe_optimizer.paged_attention(*inputs)
    torch.ops.moe_optimizer.paged_attention_out(*inputs, out)
    return out


def check_attention(inputs: AttentionInputs, out: Tensor | None = None) -> None:
    """Raise TensorContractError unless the inputs (and `out`) fit each other and the contract."""
    check = TensorChecks("paged_attention")
    q, keys, values, tables, lengths = inputs
    if q.device.type != "cpu":
        raise check.error("q", "device", q.device, "cpu: there is no kernel for another")
    check.shape("q", q, "S", "H", "d")
    check.dtype("q", q, *_DTYPES)
    check.contiguous_rows("q", q)
    check.shape("keys", keys, "B", "P", "K", "d")
    check.shape("values", values, "B", "P", "K", "d")
    for name, tensor in (("keys", keys), ("values", values)):
        check.dtype(name, tensor, q.dtype)
        if not tensor.is_contiguous():
            raise check.error(name, "strides", list(tensor.stride()), "a contiguous tensor")
    heads, kv_heads = q.shape[1], keys.shape[2]
    if not kv_heads or heads % kv_heads:
        raise check.error("keys", "dim 2 (K)", kv_heads, f"a divisor of {heads} (q dim 1)")
    if not keys.shape[1]:
        raise check.error("keys", "dim 1 (P)", 0, "at least 1")
    check.shape("block_tables", tables, "S", "N")
    check.dtype("block_tables", tables, torch.int32)
    check.contiguous_rows("block_tables", tables)
    check.shape("context_lengths", lengths, "S")
    check.dtype("context_lengths", lengths, torch.int64)
    if not lengths.is_contiguous():
        raise check.error("context_lengths", "strides", list(lengths.stride()), "a contiguous tensor")
    if out is not None:
        check.shape("out", out, "S", "H", "d")
        check.dtype("out", out, q.dtype)
        check.contiguous_rows("out", out)
    check.devices(inputs._asdict() | {"out": out}, q.device)


def run_attention(inputs: AttentionInputs, out: Tensor, *, isa: str = "") -> None:
    """Compute checked inputs into `out`. `isa` forces a lesser instruction set than this machine's best."""
    available, reason = _load.kernels_available()
    if not available:
        _load.warn_of_reference("paged_attention", reason)
        out.copy_(reference.paged_attention(*inputs))
        return
    q, keys, values, tables, lengths = inputs
    call = {
        "num_sequences": q.shape[0], "num_heads": q.shape[1], "num_kv_heads": keys.shape[2], "head_size": q.shape[2],
        "num_blocks": keys.shape[0], "block_size": keys.shape[1], "dtype": DTYPE_CODE[q.dtype],
        "q": q.data_ptr(), "keys": keys.data_ptr(), "values": values.data_ptr(), "out": out.data_ptr(),
        "q_stride": q.stride(0), "q_head_stride": q.stride(1),
        "out_stride": out.stride(0), "out_head_stride": out.stride(1),
        "block_tables": tables.data_ptr(), "table_width": tables.shape[1], "table_stride": tables.stride(0),
        "context_lengths": lengths.data_ptr(), "scale": q.shape[2] ** -0.5 if q.shape[2] else 1.0,
    }  # fmt: skip
    try:
        _load.kernels().paged_attention(call, isa)
    except ValueError as error:
        raise TensorContractError(f"paged_attention: {error}") from None


register_op(
    "paged_attention",
    "Tensor q, Tensor keys, Tensor values, Tensor block_tables, Tensor context_lengths",
    parse=AttentionInputs._make,
    check=check_attention,
    run=run_attention,
)
