"""`MoE`: the sparse feed-forward layer. The router picks experts, and one kernel of `ops` computes them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_optimizer import ops
from moe_optimizer.engine.layers.linear import Layer, Linear, Place
from moe_optimizer.engine.layers.ranks import ALONE, Ranks

Names = tuple[str, str, str]


class MoE(nn.Module):
    """The weighted sum of the outputs of the `top_k` experts that the router scores highest.

    `sizes` are experts, hidden size and columns of an expert; `names` what a checkpoint calls its gate, up and down.
    `renormalize` makes a token's weights sum to 1.
    """

    fused = True
    """False computes the experts in plain torch."""

    def __init__(
        self, sizes: tuple[int, int, int], names: Names, *, top_k: int, renormalize: bool, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.ranks = top_k, renormalize, ranks
        self.gate = Linear(sizes[1], sizes[0])
        self.experts = Experts(sizes, names, ranks)

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

    def __init__(self, sizes: tuple[int, int, int], names: Names, ranks: Ranks) -> None:
        super().__init__()
        num_experts, hidden_size, intermediate_size = sizes
        whole = ranks.expert_parallel
        self.num_experts, self.names = num_experts, names
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

    def places(self, name: str) -> Iterator[tuple[str, Place]]:
        for expert in range(self.num_experts):
            held = slice(max(0, expert - self.first), max(0, expert - self.first + 1))
            gate_up, down = self.w13.data[held], self.w2.data[held]
            targets = [*(each.flatten(0, 1) for each in gate_up.chunk(2, 1)), down.flatten(0, 1)]
            for matrix, target, dim in zip(self.names, targets, (0, 0, 1), strict=True):
                yield f"{name}.{expert}.{matrix}.weight", Place(target, dim, self.slices)

    def to_fp8(self) -> None:
        """Hold the weights in FP8 (E4M3) with one float32 scale for each 128x128 block."""
        from moe_optimizer.ops.fp8_quant import quantize_fp8

        for name in ("w13", "w2"):
            weight, scale = quantize_fp8(self.get_parameter(name).data)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{name}_scale", scale)
