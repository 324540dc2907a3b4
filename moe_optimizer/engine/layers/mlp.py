"""`MLP`: the dense feed-forward layer (SwiGLU)."""

import torch.nn.functional as F
from torch import Tensor, nn

from moe_optimizer.engine.layers.linear import Linear, MergedLinear
from moe_optimizer.engine.layers.ranks import ALONE, Ranks


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    fused_methods = ("activated",)

    def __init__(self, hidden_size: int, intermediate_size: int, *, ranks: Ranks = ALONE) -> None:
        super().__init__()
        mine = ranks.share(intermediate_size, "columns of an MLP")
        self.gate_up_proj = MergedLinear(hidden_size, {"gate": mine, "up": mine}, ranks=ranks)
        self.down_proj = Linear(intermediate_size, hidden_size, ranks=ranks)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down_proj(self.activated(*self.gate_up_proj(x_TH)))

    def activated(self, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        return F.silu(gate_TI) * up_TI
