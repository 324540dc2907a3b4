"""`MoE`: the sparse feed-forward layer. The router picks experts, and one kernel of `ops` computes them."""

from typing import Any

import torch
from torch import Tensor, nn

from moe_optimizer import ops
from moe_optimizer.engine.layers.linear import Layer, Linear, Shard, copy_slice
from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.errors import InputError


class MoE(nn.Module):
    """The weighted sum of the outputs of the `top_k` experts that the router scores highest.

    `sizes` are experts, hidden size and columns of an expert. `renormalize` makes a token's weights sum to 1.
    """

    fused = True
    """False computes the experts in plain torch."""

    def __init__(self, sizes: tuple[int, int, int], *, top_k: int, renormalize: bool, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.ranks = top_k, renormalize, ranks
        self.gate = Linear(sizes[1], sizes[0])
        self.experts = Experts(*sizes, ranks)

    def forward(self, x_TH: Tensor) -> Tensor:
        experts, compute = self.experts, ops.flash_dmoe if self.fused else _plain
        options: dict[str, Any] = {"top_k": self.top_k, "renormalize": self.renormalize}
        options |= {name: getattr(experts, name) for name in ("expert_map", "w13_scale", "w2_scale")}
        return self.ranks.sum(compute(x_TH, self.gate(x_TH), experts.w13, experts.w2, **options))


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

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, ranks: Ranks) -> None:
        super().__init__()
        whole = ranks.expert_parallel
        self.num_experts = num_experts
        self.slices = ALONE if whole else ranks
        held = ranks.share(num_experts, "experts") if whole else num_experts
        self.first = ranks.rank * held if whole else 0
        width = self.slices.share(intermediate_size, "columns of an expert")
        self.w13 = nn.Parameter(torch.empty(held, 2 * width, hidden_size))
        self.w2 = nn.Parameter(torch.empty(held, hidden_size, width))
        self.w13_scale: Tensor | None = None
        self.w2_scale: Tensor | None = None
        self.expert_map: Tensor | None = None
        if held < num_experts:
            local = torch.arange(num_experts, dtype=torch.int32) - self.first
            self.expert_map = local.where((local >= 0) & (local < held), -1)

    def load_weight(self, name: str, tensor: Tensor, shard: Shard) -> int:
        assert isinstance(shard, tuple), f"got shard {shard!r}, expected (gate, up or down, expert)"
        matrix, expert = shard
        if expert >= self.num_experts:
            raise InputError(f"got expert {expert}, expected {self.num_experts} experts by config.json")
        local = expert - self.first
        if not 0 <= local < len(self.w13):
            return 0
        target = self.get_parameter(name)[local]
        if matrix == "down":
            return copy_slice(target, tensor, 1, self.slices)
        return copy_slice(target.chunk(2)[matrix == "up"], tensor, 0, self.slices)

    def to_fp8(self) -> None:
        """Hold the weights in FP8 (E4M3) with one float32 scale for each 128x128 block."""
        from moe_optimizer.ops.fp8_quant import quantize_fp8

        for name in ("w13", "w2"):
            weight, scale = quantize_fp8(self.get_parameter(name).data)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{name}_scale", scale)
