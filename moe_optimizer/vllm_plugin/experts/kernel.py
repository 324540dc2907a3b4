"""Asks this package's CPU kernels what they cover, and tries them before vLLM depends on them."""

from __future__ import annotations

import functools

import torch

from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer
from moe_optimizer.vllm_plugin.experts.self_check import CheckedKernel, check_layer
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights

NAME = "fused_experts"


def isa() -> str:
    """Return the instruction set that the CPU kernels use on this machine."""
    from moe_optimizer.ops import best_isa

    return best_isa()


def why_not_covered(dtype: torch.dtype, *, num_experts: int, hidden: int, intermediate: int, top_k: int) -> str:
    """Return why no compiled kernel covers a layer of these sizes, or ""."""
    from moe_optimizer.ops.fused_experts import why_reference

    one = torch.empty((), dtype=dtype, device="cpu")  # expanded: the sizes without their memory
    x, w13 = one.expand(1, hidden), one.expand(num_experts, 2 * intermediate, hidden)
    w2, topk_ids = one.expand(num_experts, hidden, intermediate), one.expand(1, top_k)
    return why_reference(x, w13, w2, topk_ids) or ""


@functools.cache
def self_test(dtype: torch.dtype) -> str:
    """Compare the kernel with plain torch on a small layer. Returns "" or what is wrong.

    It runs before vLLM chooses the class, so that a kernel that raises or computes nonsense leaves the layer to vLLM's
    own class. Experts 1 and 3 of 4 are local: a kernel that ignores the expert map fails here.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") * 0.2).to(dtype)

    layer = ExpertsLayer(
        name="self-test",
        weights=KernelWeights(format=PLAIN, w13=weight(2, 64, 64), w2=weight(2, 64, 32)),
        dtype=dtype,
        top_k=2,
        expert_map=torch.tensor([-1, 0, -1, 1], dtype=torch.int32, device="cpu"),
    )
    kernel = CheckedKernel(run=functools.partial(layer.format.compute, layer.weights), tokens=(5,))
    return check_layer(layer, {f"{NAME} in {dtype}": kernel}).reason
