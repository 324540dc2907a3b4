"""The gate of `flash_dmoe` picks what vLLM's own router picks, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops.topk_router import topk_router
from tests.compiled_kernels import AVAILABLE, REASON
from tests.ops.test_flash_dmoe import routed_weights

# experts, top_k, groups, kept groups, scoring, renormalize, bias, scaling: the schemes of models vLLM serves.
SCHEMES = {
    "qwen3": (128, 8, None, None, "softmax", True, False, 1.0),
    "olmoe": (64, 8, None, None, "softmax", False, False, 1.0),
    "mixtral": (8, 2, None, None, "softmax", True, False, 1.0),
    "deepseek-v2": (160, 6, 8, 3, "softmax", False, False, 16.0),
    "deepseek-v3": (256, 8, 8, 4, "sigmoid", True, True, 2.5),
    "kimi-k2, one group": (384, 8, 1, 1, "sigmoid", True, True, 2.827),
    "sigmoid without a bias": (64, 6, 4, 2, "sigmoid", True, False, 1.5),
    "softmax with a bias": (64, 6, 4, 2, "softmax", False, True, 1.0),
    "a group per expert, no bias": (16, 3, 16, 5, "softmax", True, False, 1.0),
}


def of_vllm(router_logits: Tensor, scheme: str, score_bias: Tensor | None) -> Tensor:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

    _, top_k, groups, kept, scoring, renormalize, _, factor = SCHEMES[scheme]
    weights, ids = select_experts(
        torch.zeros(router_logits.shape[0], 16),
        router_logits,
        top_k,
        use_grouped_topk=groups is not None,
        renormalize=renormalize,
        topk_group=kept,
        num_expert_group=groups,
        scoring_func=scoring,
        routed_scaling_factor=factor,
        e_score_correction_bias=score_bias,
    )
    return dense(weights, ids, router_logits)


def dense(weights: Tensor, ids: Tensor, router_logits: Tensor) -> Tensor:
    return torch.zeros(router_logits.shape).scatter_add_(1, ids.long(), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_and_weights_are_those_of_vllm(scheme: str, dtype: torch.dtype) -> None:
    num_experts, top_k, groups, kept, scoring, renormalize, biased, factor = SCHEMES[scheme]
    generator = torch.Generator().manual_seed(7)
    # No ties, in bfloat16 either: which of two equal experts vLLM takes is not said.
    steps = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(50)])
    logits = ((steps - num_experts / 2) / 64).to(dtype)
    score_bias = torch.rand(num_experts, generator=generator) if biased else None
    gate = {
        "top_k": top_k,
        "renormalize": renormalize,
        "scoring": scoring,
        "num_expert_group": groups,
        "topk_group": kept,
        "score_bias": score_bias,
        "routed_scaling_factor": factor,
    }
    want = of_vllm(logits.float(), scheme, score_bias)
    torch.testing.assert_close(dense(*topk_router(logits, **gate), logits), want, rtol=1e-5, atol=1e-7)
    if not AVAILABLE:
        pytest.skip(f"compiled kernels: {REASON}")
    torch.testing.assert_close(routed_weights(logits, **gate), want, rtol=1e-5, atol=1e-6)
