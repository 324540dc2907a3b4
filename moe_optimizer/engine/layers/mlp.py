"""`MLP`: the dense feed-forward layer (SwiGLU)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.linear import Linear, MergedLinear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden_size, {"gate": intermediate_size, "up": intermediate_size})
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Transform every token."""
        gate, up = self.gate_up_proj(x_TH)
        return self.down_proj(F.silu(gate) * up)
