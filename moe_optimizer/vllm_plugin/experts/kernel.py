"""The one place where the plugin calls this package's kernels, and tries them before vLLM depends on them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moe_optimizer.errors import described

if TYPE_CHECKING:
    import torch

NAME = "fused_experts"


def isa() -> str:
    """Return the instruction set that the CPU kernels use on this machine."""
    from moe_optimizer.ops import best_isa

    return best_isa()


def why_not_covered(dtype: torch.dtype, *, num_experts: int, hidden: int, intermediate: int, top_k: int) -> str:
    """Return why no compiled kernel covers a layer of these sizes, or ""."""
    import torch

    from moe_optimizer.ops.fused_experts import why_reference

    one = torch.empty((), dtype=dtype, device="cpu")  # expanded: the sizes without their memory
    x, w13 = one.expand(1, hidden), one.expand(num_experts, 2 * intermediate, hidden)
    w2, topk_ids = one.expand(num_experts, hidden, intermediate), one.expand(1, top_k)
    return why_reference(x, w13, w2, topk_ids) or ""


@functools.cache
def self_test(dtype: torch.dtype) -> str:
    """Run the kernel once on a small problem and compare with plain torch. Returns "" or what is wrong.

    It runs before vLLM chooses the class, so a kernel that crashes in Python, was built for something else or
    computes nonsense is refused and stock takes over. Experts 1 and 3 of 4 are local: a kernel that ignores
    the expert map fails here.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") * scale).to(dtype)

    tokens, hidden, intermediate = 5, 64, 32
    x, w13, w2 = randn(tokens, hidden), randn(2, 2 * intermediate, hidden, scale=0.2), randn(2, hidden, intermediate)
    topk_ids = torch.tensor([[0, 1], [1, 3], [3, 2], [2, 0], [3, 1]], dtype=torch.int32, device="cpu")
    topk_weights = torch.rand(tokens, 2, generator=generator, dtype=torch.float32, device="cpu")
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32, device="cpu")
    try:
        from moe_optimizer.ops.fused_experts import fused_experts

        got = fused_experts(x, w13, w2, topk_weights, topk_ids, expert_map=expert_map).float()
    except Exception as error:  # noqa: BLE001 - whatever is broken, stock vLLM must take over
        return described(error)
    want = _reference(x, w13, w2, topk_weights, topk_ids, expert_map)
    # Rounding the result once costs half an ulp of it, accumulation in another order a few more.
    tolerance = 8 * torch.finfo(dtype).eps * want.abs().max().item()
    error = (got - want).abs().max().item()
    if not error <= tolerance:
        return f"wrong result in {dtype}: error {error:.3g}, expected at most {tolerance:.3g}"
    return ""


def _reference(  # noqa: PLR0917 - the inputs of one layer
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts one token and one expert at a time, in FP32. Not the ops' reference on purpose:
    a mistake shared by kernel and reference would pass unseen.
    """
    import torch

    out = torch.zeros(x.shape, dtype=torch.float32, device="cpu")
    for token, ids in enumerate(topk_ids.tolist()):
        for choice, expert in enumerate(ids):
            local = int(expert_map[expert])
            if local < 0:
                continue
            gate, up = (w13[local].float() @ x[token].float()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[token] += topk_weights[token, choice] * (w2[local].float() @ hidden)
    return out
