"""The operations of this package in plain torch: what the compiled kernels must compute.

Each docstring is the specification. The kernels are tested against these functions, and sizes that no
kernel covers run here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.int4 import Int4Weight, dequantize_int4
from moe_optimizer.ops.mxfp4 import PACKED_DTYPE, dequantize_mxfp4

SCALE_BLOCK = 128
"""Rows and columns of a weight block that share one FP32 scale, in the block-wise FP8 format."""

SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0


def fused_experts(
    x: Tensor,
    w13: Tensor | Int4Weight,
    w2: Tensor | Int4Weight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weighted sum of the outputs of the experts each token was routed to.

    out[t] = sum over slots j of topk_weights[t, j] * expert(topk_ids[t, j])(x[t]), where

        expert(e)(v) = activate(v @ w13[e].T + w13_bias[e]) @ w2[e].T + w2_bias[e]
        activate(u)  = silu(u[:I]) * u[I:]                                   for "silu"
                     = g * sigmoid(1.702 g) * (1 + clamp(u[1::2], -7, 7)),
                       g = min(u[0::2], 7)                                   for "swigluoai"

    T tokens, H hidden size, I expert width, E local experts, k slots per token.

    Args:
        x: [T, H].
        w13: [E, 2I, H]: the gate rows, then the up rows ("silu"), or the two alternating ("swigluoai"). MXFP4: uint8
            [E, 2I, H / 2]. INT4: `Int4Weight`, which has its scales.
        w2: [E, H, I]; [E, H, I / 2]; `Int4Weight`.
        topk_weights: float32 [T, k].
        topk_ids: int32 or int64 [T, k]. Negative: the slot is skipped. The same expert twice counts twice.
        expert_map: int32 [number of global experts]; then topk_ids are global, expert_map[id] is the index
            into w13 and w2, and negative means the expert lives on another rank (the slot is skipped).
        activation: "silu" or "swigluoai".
        w13_scale: for FP8 weights: float32, one factor per 128x128 block [E, ceil(2I/128), ceil(H/128)], or
            one per output channel [E, 2I]. For MXFP4 weights: uint8 [E, 2I, H / 32], as `mxfp4` describes.
        w2_scale: likewise [E, ceil(H/128), ceil(I/128)] or [E, H]; [E, H, I / 32].
        w13_bias: [E, 2I] or None.
        w2_bias: [E, H] or None.
        compute_dtype: dtype of every step; float32 is the specification, others show what they would cost.

    Returns:
        [T, H], dtype of x. A token without a valid slot is zero.

    Raises:
        TensorContractError: an id names no expert.
    """
    num_experts = (w13.codes if isinstance(w13, Int4Weight) else w13).shape[0]
    local_ids = _below(topk_ids.long(), num_experts if expert_map is None else expert_map.shape[0], "topk_ids")
    if expert_map is not None:
        mapped = expert_map.long()[local_ids.clamp(min=0)] if local_ids.numel() else local_ids
        local_ids = _below(torch.where(local_ids < 0, local_ids, mapped), num_experts, "expert_map")

    out = torch.zeros(x.shape, dtype=compute_dtype, device=x.device)
    for expert in range(num_experts):
        tokens, slots = torch.nonzero(local_ids == expert, as_tuple=True)
        if tokens.numel() == 0:
            continue
        rows = x[tokens].to(compute_dtype)
        gate_up = rows @ dequantize(w13, w13_scale, expert, compute_dtype).T
        if w13_bias is not None:
            gate_up = gate_up + w13_bias[expert].to(compute_dtype)
        down = activate(gate_up, activation) @ dequantize(w2, w2_scale, expert, compute_dtype).T
        if w2_bias is not None:
            down = down + w2_bias[expert].to(compute_dtype)
        out.index_add_(0, tokens, down * topk_weights[tokens, slots, None].to(compute_dtype))
    return out.to(x.dtype)


def gate_logits(x: Tensor, gate: Tensor) -> Tensor:
    """Return what each expert's gate says of each token, logits [T, E]: x @ gate.T, rounded once to the dtype of x.

    Args:
        x: [T, H].
        gate: [E, H].
    """
    return (x.float() @ gate.float().T).to(x.dtype)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, context_lengths: Tensor) -> Tensor:
    """Return the attention of one query per sequence over its pages; arguments as in `ops.paged_attention`.

    With k and v the first context_lengths[s] rows of the blocks in block_tables[s], and h' = h // (H / K):

        out[s, h] = softmax(q[s, h] . k[:, h'] / sqrt(d)) @ v[:, h']

    Computed in float32, rounded once to the dtype of q; 0 where the context is empty.

    Raises:
        TensorContractError: a context is longer than its table, or a block is outside the cache.
    """
    out, (num_blocks, block_size, kv_heads, size) = torch.zeros_like(q), keys.shape
    for row, length in enumerate(context_lengths.tolist()):
        if not 0 <= length <= block_tables.shape[1] * block_size:
            limit = block_tables.shape[1] * block_size
            raise TensorContractError(
                f"paged_attention: context_lengths: got {length} for sequence {row}, expected 0 to {limit}"
            )
        blocks = block_tables[row, : -(-length // block_size)].long()
        for block in blocks[(blocks < 0) | (blocks >= num_blocks)].tolist():
            raise TensorContractError(
                f"paged_attention: block_tables: got block {block} for sequence {row}, expected one of {num_blocks}"
            )
        k_LKd, v_LKd = (each[blocks].flatten(0, 1)[:length].float() for each in (keys, values))
        q_KRd = q[row].float().unflatten(0, (kv_heads, -1))
        weights_KRL = (torch.einsum("krd,lkd->krl", q_KRd, k_LKd) * size**-0.5).softmax(-1)
        if length:
            out[row] = torch.einsum("krl,lkd->krd", weights_KRL, v_LKd).flatten(0, 1).to(q.dtype)
    return out


def _below(ids: Tensor, limit: int, name: str) -> Tensor:
    if ids.numel() and int(ids.max()) >= limit:
        raise TensorContractError(
            f"fused_experts: {name}: got expert {int(ids.max())}, expected below {limit}, or negative to skip"
        )
    return ids


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """Return the input of the down projection [n, I] from gate and up [n, 2I]; see `fused_experts`."""
    if activation == "swigluoai":
        gate = gate_up[:, 0::2].clamp(max=SWIGLUOAI_LIMIT)
        up = gate_up[:, 1::2].clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
        return gate * torch.sigmoid(gate * SWIGLUOAI_ALPHA) * (up + 1)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def dequantize(weight: Tensor | Int4Weight, scale: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    """Return weight[expert] [rows, columns] in `dtype`, multiplied by its scales (see `fused_experts`)."""
    if isinstance(weight, Int4Weight):
        return dequantize_int4(weight.expert(expert), dtype)
    if scale is not None and weight.dtype == PACKED_DTYPE:
        return dequantize_mxfp4(weight[expert], scale[expert], dtype)
    matrix = weight[expert].to(dtype)
    if scale is None:
        return matrix
    if scale.dim() == 2:
        return matrix * scale[expert, :, None].to(dtype)
    factors = scale[expert].to(dtype).repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return matrix * factors[: matrix.shape[0], : matrix.shape[1]]
