"""A layer to convert, a call of it, and what a converted layer must compute."""

from __future__ import annotations

from typing import Any

import torch

from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, WeightFormat

NAME = "model.layers.1.mlp.experts"
EXPERTS, HIDDEN, WIDTH = 4, 128, 32


def layer() -> tuple[Any, Any]:
    """Return w13 and w2 in BF16."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.1
    return w13.bfloat16(), (torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.1).bfloat16()


def layer_call(tokens: int, *, even: tuple[int, int], odd: tuple[int, int]) -> ExpertsCall:
    """Return a call of an even number of tokens that go in turn to two experts and to two others."""
    return ExpertsCall(
        out=torch.empty(tokens, HIDDEN, dtype=torch.bfloat16),
        x=torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16(),
        topk_weights=torch.full((tokens, 2), 0.5),
        topk_ids=torch.tensor([even, odd] * (tokens // 2), dtype=torch.int32),
        expert_map=None,
        w13_bias=None,
        w2_bias=None,
    )


def assert_computes_with(form: WeightFormat, converted: KernelWeights) -> None:
    """The format's kernel gives what plain torch gives with the weights that the format restores."""
    call = layer_call(6, even=(0, 1), odd=(2, 3))
    form.compute(converted, call)
    want = torch.zeros(call.x.shape)
    for token, ids in enumerate(call.topk_ids.tolist()):
        for expert in ids:
            w13, w2 = form.dense_expert(converted, expert)
            gate, up = (w13 @ call.x[token].float()).chunk(2)
            want[token] += 0.5 * (w2 @ (torch.nn.functional.silu(gate) * up))
    assert (call.out.float() - want).abs().max() < 0.02 * want.abs().max()
