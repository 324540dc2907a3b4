"""A number for each expert of a layer that tells its weights from any other's, wherever they lie."""

from __future__ import annotations

import torch

from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights

UNKNOWN = 0
"""Of an expert that nobody has read."""
_FACTOR = 0x9E3779B1
"""Chosen: a large odd number, so that the tensors of an expert cannot stand in for each other."""


def expert_digests(weights: KernelWeights) -> torch.Tensor:
    """Return an int64 for each local expert [E], from every bit of its weights and scales; never `UNKNOWN`.

    Sums wrap around. The weights are read once and nothing of their size is allocated.
    """
    digests = torch.zeros(weights.w13.shape[0], dtype=torch.int64, device=weights.w13.device)
    for tensor in weights.parameters.values():
        # The rows of a matrix count apart, so that rows in another order give another digest.
        rows = _integers(tensor).sum(dim=-1, dtype=torch.int64).flatten(1)
        odd = 2 * torch.arange(rows.shape[1], device=rows.device) + 1
        digests = digests * _FACTOR + (rows * odd).sum(dim=1)
    return digests | 1


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor [E, ...] as integers, at least three dimensions."""
    tensor = tensor.detach().contiguous()
    if tensor.dim() < 3:
        tensor = tensor.reshape(len(tensor), 1, -1)
    row_bytes = tensor.shape[-1] * tensor.element_size()
    return tensor.view(torch.int32 if row_bytes % 4 == 0 else torch.uint8)
