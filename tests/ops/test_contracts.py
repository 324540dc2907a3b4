"""Every tensor of every op, damaged in every way that its contract rules out: an error, never a wrong address."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import flash_dmoe, fused_experts, sparse_experts
from moe_optimizer.ops.int4 import Int4Weight, quantize_int4
from moe_optimizer.ops.sparse_24 import prune_24
from tests.ops.moe_cases import make_case, quantized

TOKENS, HIDDEN, WIDTH, EXPERTS = 3, 160, 80, 8
Arguments = dict[str, Tensor]


def fused_arguments(scales: str = "") -> Arguments:
    case = make_case(TOKENS, HIDDEN, WIDTH, EXPERTS, biases=True)
    case = quantized(case, scales) if scales else case
    tensors = {"x": case.x, "w13": case.w13, "w2": case.w2, "topk_weights": case.topk_weights}
    tensors |= {"topk_ids": case.topk_ids, "out": torch.empty_like(case.x)}
    tensors |= {"expert_map": torch.arange(EXPERTS, dtype=torch.int32)}
    optional = {name: getattr(case, name) for name in ("w13_scale", "w2_scale", "w13_bias", "w2_bias")}
    return tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}


def flash_arguments() -> Arguments:
    tensors = fused_arguments()
    del tensors["topk_weights"], tensors["topk_ids"]
    return tensors | {"router_logits": torch.randn(TOKENS, EXPERTS), "score_bias": torch.zeros(EXPERTS)}


def sparse_arguments() -> Arguments:
    case = make_case(TOKENS, HIDDEN, WIDTH, EXPERTS, dtype=torch.bfloat16)
    (w13, w13_mask), (w2, w2_mask) = prune_24(case.w13), prune_24(case.w2)
    tensors = {"x": case.x, "w13": w13, "w13_mask": w13_mask, "w2": w2, "w2_mask": w2_mask}
    tensors |= {"topk_weights": case.topk_weights, "topk_ids": case.topk_ids}
    return tensors | {"expert_map": torch.arange(EXPERTS, dtype=torch.int32), "out": torch.empty_like(case.x)}


def int4_arguments() -> Arguments:
    case = make_case(TOKENS, HIDDEN, 96, EXPERTS, biases=True)
    tensors = {"x": case.x}
    for name, weight in (("w13", case.w13), ("w2", case.w2)):
        int4 = quantize_int4(weight, 32, zero_points=True)
        assert int4.zero is not None
        tensors |= {name: int4.codes, f"{name}_scale": int4.scale, f"{name}_zero": int4.zero}
    tensors |= {"topk_weights": case.topk_weights, "topk_ids": case.topk_ids}
    for name, bias in (("w13_bias", case.w13_bias), ("w2_bias", case.w2_bias)):
        assert bias is not None
        tensors[name] = bias
    return tensors | {"expert_map": torch.arange(EXPERTS, dtype=torch.int32), "out": torch.empty_like(case.x)}


def call_int4(**tensors: Any) -> Tensor:
    given = dict(tensors)
    for name in ("w13", "w2"):
        given[name] = Int4Weight(given[name], given.pop(f"{name}_scale"), given.pop(f"{name}_zero"))
    return fused_experts(**given)


def call_flash(**tensors: Any) -> Tensor:
    return flash_dmoe(top_k=2, **tensors)


OPS: dict[str, tuple[Callable[..., Tensor], Callable[[], Arguments]]] = {
    "fused_experts": (fused_experts, fused_arguments),
    "fused_experts, block scales": (fused_experts, lambda: fused_arguments("block")),
    "fused_experts, channel scales": (fused_experts, lambda: fused_arguments("channel")),
    "flash_dmoe": (call_flash, flash_arguments),
    "sparse_experts": (sparse_experts, sparse_arguments),
    "int4_experts": (call_int4, int4_arguments),
}
WITHOUT_STRIDES = {"x", "w13", "w13_mask", "w2", "w2_mask", "out", "router_logits"}
"""Read in place, so their rows must be contiguous; the others are small and may have any strides."""


def damages(op: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "dimensions", tensor[None, None]
    yield "dtype", tensor.double()
    yield "device", tensor.to("meta")
    for dim in range(tensor.dim()):
        # Without logits to compare with, any length of a map is a number of global experts.
        if name != "expert_map" or op == "flash_dmoe":
            yield f"dim {dim}", tensor.narrow(dim, 0, tensor.shape[dim] - 1)
    if name in WITHOUT_STRIDES:
        yield "stride", tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


DAMAGED = [
    pytest.param(op, name, kind, id=f"{op}: {name}: {kind}")
    for op, (_, arguments) in OPS.items()
    for name, tensor in arguments().items()
    for kind, _ in damages(op, name, tensor)
]


@pytest.mark.parametrize("op", OPS)
def test_the_arguments_that_are_damaged_below_are_right(op: str) -> None:
    call, arguments = OPS[op]
    assert call(**arguments()).shape == (TOKENS, HIDDEN)


@pytest.mark.parametrize(("op", "name", "kind"), DAMAGED)
def test_a_damaged_tensor_is_refused_with_what_was_got_and_expected(op: str, name: str, kind: str) -> None:
    call, arguments = OPS[op]
    tensors = arguments()
    damaged = dict(damages(op, name, tensors[name]))[kind]
    with pytest.raises(TensorContractError, match=r": got.*, expected ") as refused:
        call(**tensors | {name: damaged})
    # What this tensor binds is missed in the next one that has it.
    bound = kind.startswith("dim ") or f"bound by {name})" in str(refused.value)
    assert bound or re.search(rf"\b{name}:? {kind}", str(refused.value)), refused.value


@pytest.mark.parametrize("op", OPS)
def test_small_tensors_may_have_any_strides(op: str) -> None:
    call, arguments = OPS[op]
    tensors = arguments()
    want = call(**tensors).clone()
    for name in tensors.keys() - WITHOUT_STRIDES:
        doubled = torch.stack([tensors[name], torch.zeros_like(tensors[name])], dim=-1)
        assert torch.equal(call(**tensors | {name: doubled[..., 0]}), want), name
