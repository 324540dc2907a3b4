"""`RMSNorm`."""

import torch
from torch import Tensor, nn

from moe_optimizer.engine.layers.linear import Layer
from moe_optimizer.ops import token_rows


class RMSNorm(Layer):
    """Divides by the root of the mean square, in float32, and multiplies by a weight, in the model's dtype."""

    fused_methods = ("forward", "add")

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum, normalized, and the sum."""
        if (at_once := token_rows.add_rms_norm(x, residual, self.weight, self.eps)) is not None:
            return at_once
        residual = x + residual
        return normalized(residual, self.weight, self.eps), residual


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do what `RMSNorm` does, in methods that are compiled as a whole."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
