"""`MoE`: the sparse feed-forward layer. The router picks experts, and one kernel of `ops` computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_optimizer import ops
from moe_optimizer.engine.layers.linear import Layer, Linear, Shard, copy_checked
from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.errors import InputError


class MoE(nn.Module):
    """The weighted sum of the outputs of the `top_k` experts that the router scores highest.

    Args:
        renormalize: make the weights of a token's experts sum to 1.
    """

    fused = True
    """False computes the experts in plain torch."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.ranks = top_k, renormalize, ranks
        self.gate = Linear(hidden_size, num_experts)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, ranks)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Transform every token."""
        experts, logits_TE = self.experts, self.gate(x_TH)
        compute = ops.flash_dmoe if self.fused else _plain
        return self.ranks.sum(
            compute(
                x_TH,
                logits_TE,
                experts.w13,
                experts.w2,
                top_k=self.top_k,
                renormalize=self.renormalize,
                expert_map=experts.expert_map,
                w13_scale=experts.w13_scale,
                w2_scale=experts.w2_scale,
            )
        )


def _plain(
    x_TH: Tensor, logits_TE: Tensor, w13: Tensor, w2: Tensor, *, top_k: int, renormalize: bool, **tensors: Any
) -> Tensor:
    """Compute the experts one after the other in plain torch, as a naive engine does."""
    from moe_optimizer.ops import reference
    from moe_optimizer.ops.topk_router import topk_router

    routed = topk_router(logits_TE, top_k=top_k, renormalize=renormalize)
    return reference.fused_experts(x_TH, w13, w2, *routed, **tensors)


class Experts(Layer):
    """The experts' weights as the kernels read them: gate and up rows in w13 [E, 2I, H], down in w2 [E, H, I].

    With several ranks each holds a slice I of every expert, or with expert parallelism some experts whole.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, ranks: Ranks) -> None:
        super().__init__()
        whole = ranks.expert_parallel
        self.num_experts = num_experts
        self.slices = ALONE if whole else ranks
        held = ranks.share(num_experts, "experts") if whole else num_experts
        self.first = ranks.rank * held if whole else 0
        self.intermediate_size = self.slices.share(intermediate_size, "columns of an expert")
        self.w13 = nn.Parameter(torch.empty(held, 2 * self.intermediate_size, hidden_size))
        self.w2 = nn.Parameter(torch.empty(held, hidden_size, self.intermediate_size))
        self.w13_scale: Tensor | None = None
        self.w2_scale: Tensor | None = None
        self.expert_map: Tensor | None = None
        if held < num_experts:
            local = torch.arange(num_experts, dtype=torch.int32) - self.first
            self.expert_map = local.where((local >= 0) & (local < held), -1)

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        """Copy one matrix of one expert, if this rank has it."""
        assert isinstance(shard, tuple), f"got shard {shard!r}, expected (gate, up or down, expert)"
        matrix, expert = shard
        half = self.intermediate_size
        if expert >= self.num_experts:
            raise InputError(f"got expert {expert}, expected {self.num_experts} experts by config.json")
        local = expert - self.first
        if not 0 <= local < len(self.w13):
            return 0
        rows = {"gate": slice(0, half), "up": slice(half, 2 * half), "down": slice(None)}[matrix]
        mine = self.slices.slice_of(tensor, 1 if matrix == "down" else 0, half)
        return copy_checked(self.get_parameter(name)[local, rows], mine)

    def to_fp8(self) -> None:
        """Hold the weights in FP8 (E4M3) with one float32 scale for each 128x128 block."""
        from moe_optimizer.ops.fp8_quant import quantize_fp8

        for name in ("w13", "w2"):
            weight, scale = quantize_fp8(self.get_parameter(name).data)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{name}_scale", scale)
