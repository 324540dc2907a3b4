"""The op `gate_topk`: its contract, and what it computes where no kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import gate_topk, reference
from moe_optimizer.ops.topk_router import topk_router
from tests.gate_cases import RULES

OPTIONS: dict[str, Any] = {"top_k": 3, "renormalize": False, "routed_scaling_factor": 1.5}


def inputs(tokens: int = 5, experts: int = 12, hidden: int = 24) -> dict[str, Any]:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    return {"x": x, "gate": torch.randn(experts, hidden, generator=g).bfloat16()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_equals_the_top_k_of_the_logits(tokens, dtype):
    x, gate = (tensor.to(dtype) for tensor in inputs(tokens).values())
    logits = torch.full((tokens, 12), float("nan"), dtype=dtype)
    weights, ids = gate_topk(x, gate, **OPTIONS, logits=logits)
    assert torch.equal(logits, reference.gate_logits(x, gate))
    want = topk_router(logits, **OPTIONS)
    assert torch.equal(ids, want[1])
    assert torch.equal(weights, want[0])


@pytest.mark.parametrize("rule", RULES)
def test_takes_every_rule(rule):
    experts, options = RULES[rule]
    given = dict(options)
    bias = torch.randn(experts) if given.pop("bias", False) else None
    call = inputs(experts=experts)
    want = topk_router(reference.gate_logits(**call), score_bias=bias, **given)
    got = gate_topk(**call, score_bias=bias, **given)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


def test_padding_goes_to_no_expert():
    padding = torch.tensor([False, True, False, True, True])
    want, got = gate_topk(**inputs(), **OPTIONS), gate_topk(**inputs(), **OPTIONS, is_padding=padding)
    assert torch.equal(got[1], want[1].masked_fill(padding[:, None], -1))
    assert torch.equal(got[0], want[0].masked_fill(padding[:, None], 0))


def test_writes_into_what_it_is_given():
    weights, ids = torch.full((5, 3), -1.0), torch.full((5, 3), -1, dtype=torch.int32)
    got = gate_topk(**inputs(), **OPTIONS, topk_weights=weights, topk_ids=ids)
    assert got[0] is weights
    assert got[1] is ids
    assert (ids >= 0).all()
    assert (weights > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 23).bfloat16()}, "gate dim 1"),
        ({"gate": torch.zeros(12, 24)}, "gate dtype"),
        ({"top_k": 13}, "top_k"),
        ({"scoring": "tanh"}, "scoring"),
        ({"num_expert_group": 5, "topk_group": 1}, "num_expert_group"),
        ({"score_bias": torch.zeros(11)}, "score_bias dim 0"),
        ({"score_bias": torch.zeros(12).bfloat16()}, "score_bias dtype"),
        ({"is_padding": torch.zeros(5)}, "is_padding dtype"),
        ({"is_padding": torch.zeros(4, dtype=torch.bool)}, "is_padding dim 0"),
        ({"logits": torch.zeros(5, 12)}, "logits dtype"),
        ({"logits": torch.zeros(12, 5).bfloat16().T}, "logits strides"),
        ({"topk_ids": torch.zeros(5, 3, dtype=torch.int64)}, "topk_ids dtype"),
        ({"topk_ids": torch.zeros(5, 4, dtype=torch.int32)}, "topk_ids dim 1"),
        ({"topk_weights": torch.zeros(4, 3)}, "topk_weights dim 0"),
        ({"x": torch.zeros(5, 24, device="meta").bfloat16()}, "device"),
    ],
    ids=str,
)
def test_an_argument_outside_the_contract_is_named(change, message):
    call: dict[str, Any] = {**inputs(), "top_k": 3} | change
    with pytest.raises(TensorContractError, match=message):
        gate_topk(**call)


def test_the_registered_op_passes_torchs_checks():
    x, gate = inputs().values()
    rule = (3, torch.zeros(12), True, "sigmoid", 4, 2, 2.5, torch.arange(5) > 3)
    written = (torch.empty(5, 12).bfloat16(), torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int32))
    torch.library.opcheck(torch.ops.moe_optimizer.gate_topk_out.default, (x, gate, *rule, *written))
