"""`MoE`: the sparse feed-forward layer. The router picks experts, and one kernel of `ops` computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_optimizer import ops
from moe_optimizer.engine.layers.linear import Layer, Linear, Shard, copy_checked
from moe_optimizer.errors import InputError


class MoE(nn.Module):
    """The weighted sum of the outputs of the `top_k` experts that the router scores highest.

    Args:
        renormalize: make the weights of a token's experts sum to 1.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, renormalize: bool
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalize = renormalize
        self.gate = Linear(hidden_size, num_experts)
        self.experts = Experts(hidden_size, intermediate_size, num_experts)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Transform every token."""
        return ops.flash_dmoe(
            x_TH,
            self.gate(x_TH),
            self.experts.w13,
            self.experts.w2,
            top_k=self.top_k,
            renormalize=self.renormalize,
            w13_scale=self.experts.w13_scale,
            w2_scale=self.experts.w2_scale,
        )


class Experts(Layer):
    """The experts' weights as the kernels read them: gate and up rows in w13 [E, 2I, H], down in w2 [E, H, I]."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.w13_scale: Tensor | None = None
        self.w2_scale: Tensor | None = None

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> None:
        """Copy one matrix of one expert."""
        assert isinstance(shard, tuple), f"got shard {shard!r}, expected (gate, up or down, expert)"
        matrix, expert = shard
        half = self.intermediate_size
        if expert >= len(self.w13):
            raise InputError(f"got expert {expert}, expected {len(self.w13)} experts by config.json")
        rows = {"gate": slice(0, half), "up": slice(half, 2 * half), "down": slice(None)}[matrix]
        copy_checked(self.get_parameter(name)[expert, rows], tensor)

    def to_fp8(self) -> None:
        """Hold the weights in FP8 (E4M3) with one float32 scale for each 128x128 block."""
        from moe_optimizer.ops.fp8_quant import quantize_fp8

        for name in ("w13", "w2"):
            weight, scale = quantize_fp8(self.get_parameter(name).data)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{name}_scale", scale)
