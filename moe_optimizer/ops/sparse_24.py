"""2:4 sparse weights: which two of every four are kept, and how they are stored.

[E, N, K] BF16 becomes values [E, N, K / 2] BF16 and a mask uint8 [E, N, K / 8]: 9 bits for what took 16. Bit k % 8 of
byte k / 8 is set where column k is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError

SIZE_MULTIPLE = 16
"""Of K: what the kernel expands at once."""
_GROUP, _KEPT = 4, 2
_BITS = 8


class SparseWeight(NamedTuple):
    """The experts' weights of one projection. N rows, K columns before pruning."""

    values: Tensor
    """[E, N, K / 2]: the kept weights in the order of the columns."""
    mask: Tensor
    """uint8 [E, N, K / 8]."""


def prune_24(weight: Tensor, norms: Tensor | None = None) -> SparseWeight:
    """Keep two of every four consecutive weights of a row: those with the largest |weight| x norm of their input.

    Each row loses what changes its output least, were the inputs independent. Of equals the earlier is kept.

    Args:
        weight: bfloat16 [E, N, K], finite, K a multiple of 16.
        norms: norm of each input column over calibration tokens, [K] or [E, K], finite and not negative. None: all
            inputs count alike, so magnitude alone decides.

    Raises:
        TensorContractError: something is not as above.
    """
    if weight.dim() != 3 or weight.dtype != torch.bfloat16 or weight.shape[2] % SIZE_MULTIPLE:
        raise TensorContractError(
            f"prune_24: weight: got {weight.dtype} {list(weight.shape)}, "
            f"expected torch.bfloat16 [E, N, K] with K a multiple of {SIZE_MULTIPLE}"
        )
    experts, rows, columns = weight.shape
    if norms is not None:
        if tuple(norms.shape) not in {(columns,), (experts, columns)}:
            raise TensorContractError(
                f"prune_24: norms: got shape {list(norms.shape)}, expected [{columns}] or [{experts}, {columns}]"
            )
        if not bool(((norms >= 0) & norms.isfinite()).all()):
            raise TensorContractError("prune_24: norms: got a value that is negative or not finite")
        norms = norms.float().expand(experts, columns)
    device = weight.device
    values = torch.empty(experts, rows, columns // 2, dtype=weight.dtype, device=device)
    mask = torch.empty(experts, rows, columns // _BITS, dtype=torch.uint8, device=device)
    # One expert at a time: the scores in FP32 would otherwise take twice the memory of the layer.
    for expert in range(experts):
        dense = weight[expert]
        if not bool(dense.isfinite().all()):
            raise TensorContractError(f"prune_24: weight: expert {expert} has a value that is not finite")
        scores = dense.float().abs()
        kept = _two_of_four(scores if norms is None else scores * norms[expert])
        values[expert] = dense[kept].view(rows, columns // 2)
        mask[expert] = _packed(kept)
    return SparseWeight(values, mask)


def expand_24(weight: SparseWeight) -> Tensor:
    """Return the weights with their zeros, [..., N, K] in the dtype of the values; exact."""
    values, mask = weight
    bits = torch.arange(_BITS, dtype=torch.uint8, device=mask.device)
    kept = (mask[..., None] >> bits & 1).bool().flatten(-2)
    dense = torch.zeros(kept.shape, dtype=values.dtype, device=values.device)
    dense[kept] = values.flatten()
    return dense


def _two_of_four(scores: Tensor) -> Tensor:
    """Return bool [N, K]: whether fewer than two of its group go before a column."""
    groups = scores.unflatten(-1, (-1, _GROUP)).unbind(-1)
    before = [torch.zeros(groups[0].shape, dtype=torch.int8, device=scores.device) for _ in groups]
    for right in range(_GROUP):
        for left in range(right):
            left_first = groups[left] >= groups[right]
            before[right] += left_first
            before[left] += ~left_first
    return torch.stack([count < _KEPT for count in before], -1).flatten(-2)


def _packed(kept: Tensor) -> Tensor:
    """Return bool [N, K] as bits, uint8 [N, K / 8]."""
    weights = 1 << torch.arange(_BITS, dtype=torch.uint8, device=kept.device)
    return (kept.unflatten(-1, (-1, _BITS)) * weights).sum(-1, dtype=torch.uint8)
