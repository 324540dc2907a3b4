"""The ops in graphs that torch.compile makes: whole, for any number of tokens, also one that only the data decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import flash_dmoe, fused_experts
from tests.compiled_kernels import needs_kernels
from tests.ops.moe_cases import make_case

pytestmark = needs_kernels

TOKENS = 33
CASE = make_case(TOKENS, dtype=torch.bfloat16)
LOGITS = torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(1))
SELECTIONS = {
    "some tokens": torch.arange(TOKENS) % 3 == 0,
    "one token": torch.arange(TOKENS) == 7,
    "no token": torch.zeros(TOKENS, dtype=torch.bool),
    "all tokens": torch.ones(TOKENS, dtype=torch.bool),
}


@pytest.fixture(autouse=True)
def sizes_may_depend_on_data() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def test_one_graph_serves_any_number_of_tokens() -> None:
    graphs = []

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return x + fused_experts(x * 2, CASE.w13, CASE.w2, topk_weights, topk_ids)

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (3, 7, TOKENS):
        inputs = CASE.x[:tokens], CASE.topk_weights[:tokens], CASE.topk_ids[:tokens]
        assert torch.equal(compiled(*inputs), layer(*inputs))
    assert len(graphs) == 1


# Each indexing with a mask has a length of its own, which the graph does not know to be the same.
def selected_experts(mask: Tensor) -> Tensor:
    return fused_experts(CASE.x[mask], CASE.w13, CASE.w2, CASE.topk_weights[mask], CASE.topk_ids[mask])


def selected_experts_into_out(mask: Tensor) -> Tensor:
    x = CASE.x[mask]
    out = torch.empty_like(x)
    return fused_experts(x, CASE.w13, CASE.w2, CASE.topk_weights[mask], CASE.topk_ids[mask], out=out)


def selected_layer(mask: Tensor) -> Tensor:
    x, logits = CASE.x[mask], LOGITS[mask]
    return flash_dmoe(x, logits, CASE.w13, CASE.w2, top_k=2, num_expert_group=2, topk_group=1)


@pytest.mark.parametrize("layer", [selected_experts, selected_experts_into_out, selected_layer])
def test_the_data_may_decide_the_number_of_tokens(layer: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for name, mask in SELECTIONS.items():
        assert torch.equal(compiled(mask), layer(mask)), name


def test_numbers_of_tokens_that_only_the_data_shows_to_differ_are_refused() -> None:
    def layer(mask: Tensor, other: Tensor) -> Tensor:
        return fused_experts(CASE.x[mask], CASE.w13, CASE.w2, CASE.topk_weights[other], CASE.topk_ids[other])

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert compiled(SELECTIONS["one token"], SELECTIONS["one token"]).shape == (1, 64)
    with pytest.raises(TensorContractError, match=r"topk_ids dim 0.* 33,.* 1 "):
        compiled(SELECTIONS["one token"], SELECTIONS["all tokens"])
