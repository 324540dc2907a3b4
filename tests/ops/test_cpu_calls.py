"""A call that is repeated is the same call: what a key does not hold may not change, and what changes is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import cpu_calls, flash_dmoe, fused_experts
from moe_optimizer.ops.int4 import quantize_int4
from moe_optimizer.ops.topk_router import topk_router
from tests.compiled_kernels import needs_kernels

pytestmark = needs_kernels

EXPERTS, HIDDEN, WIDTH, TOP_K = 4, 64, 32, 2


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    cpu_calls.known().clear()
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    return w13, torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K)
    return torch.randn(count, HIDDEN, generator=generator), weights, ids.int()


def both(layer: tuple[torch.Tensor, torch.Tensor], count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result into a given output, which may be a repeated call, and a new one, which never is."""
    x, weights, ids = tokens(count, seed)
    out = fused_experts(x, *layer, weights, ids, out=torch.full_like(x, float("nan")))
    return out, fused_experts(x, *layer, weights, ids)


def test_repeated_calls_of_other_tokens_give_the_bits_of_first_ones(layer: tuple[torch.Tensor, torch.Tensor]) -> None:
    for count, seed in ((3, 0), (3, 1), (1, 2), (17, 3), (0, 4), (2, 5)):
        assert torch.equal(*both(layer, count, seed))
    assert len(cpu_calls.known()) < 6


@pytest.mark.parametrize("zero_points", [False, True])
def test_repeated_calls_with_int4_weights_give_the_bits_of_first_ones(
    layer: tuple[torch.Tensor, torch.Tensor], zero_points: bool
) -> None:
    w13, w2 = (quantize_int4(weight, 32, zero_points=zero_points) for weight in layer)
    for count, seed in ((3, 0), (3, 1), (1, 2), (17, 3)):
        x, weights, ids = tokens(count, seed)
        out = fused_experts(x, w13, w2, weights, ids, out=torch.full_like(x, float("nan")))
        assert torch.equal(out, fused_experts(x, w13, w2, weights, ids))
    assert len(cpu_calls.known()) == 1
    x, weights, ids = tokens(3, 0)
    with pytest.raises(TensorContractError, match="int4_experts: topk_ids"):
        fused_experts(x, w13, w2, weights, ids + EXPERTS, out=torch.empty_like(x))


def test_int4_weights_that_differ_in_their_scales_alone_are_not_the_same_call(
    layer: tuple[torch.Tensor, torch.Tensor],
) -> None:
    w13, w2 = (quantize_int4(weight, 32, zero_points=True) for weight in layer)
    x, weights, ids = tokens(3, 0)
    assert w13.zero is not None
    others = (
        w13._replace(scale=w13.scale * 2), w13._replace(scale=w13.scale.half()), w13._replace(zero=w13.zero // 2),
        w13._replace(zero=None),
    )  # fmt: skip
    for other in (w13, *others, w13):
        out = fused_experts(x, other, w2, weights, ids, out=torch.empty_like(x))
        assert torch.equal(out, fused_experts(x, other, w2, weights, ids))


def test_new_values_of_weights_in_place_are_read(layer: tuple[torch.Tensor, torch.Tensor]) -> None:
    before, _ = both(layer, 3, 0)
    layer[0].mul_(2)
    after, new = both(layer, 3, 0)
    assert torch.equal(after, new)
    assert not torch.equal(before, after)


def test_what_breaks_the_contract_is_refused_after_a_call_that_did_not(
    layer: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, weights, ids = tokens(3, 0)
    out = torch.empty_like(x)
    for _ in range(2):
        fused_experts(x, *layer, weights, ids, out=out)
    for wrong in (
        (x.double(), weights, ids, out),
        (x[:2], weights, ids, out),
        (x, weights.double(), ids, out),
        (x, weights, ids[:2], out),
        (x, weights, ids + EXPERTS, out),
        (x, weights, ids, out[:, :32]),
        (x, weights, ids.float(), out),
    ):
        with pytest.raises(TensorContractError):
            fused_experts(wrong[0], *layer, *wrong[1:3], out=wrong[3])


def test_in_place_and_shifted_over_each_other_are_right_again(layer: tuple[torch.Tensor, torch.Tensor]) -> None:
    # More than one pass of 2048 tokens: the first writes where the second has yet to read.
    count = 2100
    x, weights, ids = tokens(count, 0)
    want = fused_experts(x, *layer, weights, ids)
    memory = torch.zeros(count + 1, HIDDEN)
    for shift in (0, 0, 1, 1):
        memory[:count] = x
        out = memory[shift : shift + count]
        assert torch.equal(fused_experts(memory[:count], *layer, weights, ids, out=out), want)


def test_a_layer_from_its_logits_repeats_what_was_checked_of_its_experts(
    layer: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(count: int) -> torch.Tensor:
        x, logits = torch.randn(count, HIDDEN), torch.randn(count, EXPERTS)
        first = flash_dmoe(x, logits, *layer, top_k=TOP_K)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_calls, "enqueue", None)
            assert torch.equal(flash_dmoe(x, logits, *layer, top_k=TOP_K), first)
        return first

    for count in (3, 1, 17):
        cpu_calls.known().clear()
        run(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_repeated_layer_chooses_experts_by_the_rule_it_is_given(
    layer: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, wide = torch.randn(5, HIDDEN, generator=generator), torch.randn(5, 2 * EXPERTS, generator=generator)
    logits = wide.to(dtype)[:, 1 : 1 + EXPERTS]
    rules: tuple[dict[str, Any], ...] = (
        {}, {"renormalize": False}, {"scoring": "sigmoid"}, {"score_bias": torch.tensor([5.0, 0.0, 0.0, 0.0])},
        {"num_expert_group": 2, "topk_group": 1}, {"routed_scaling_factor": 2.0}, {},
    )  # fmt: skip
    for rule in rules:
        want = fused_experts(x, *layer, *topk_router(logits, top_k=TOP_K, **rule))
        for _ in range(2):
            got = flash_dmoe(x, logits, *layer, top_k=TOP_K, **rule)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_repeated_layer_refuses_an_expert_map_that_has_changed_to_a_wrong_one(
    layer: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, logits = torch.randn(3, HIDDEN), torch.randn(3, EXPERTS)
    local = torch.arange(EXPERTS, dtype=torch.int32)
    for _ in range(2):
        flash_dmoe(x, logits, *layer, top_k=TOP_K, expert_map=local)
    local += EXPERTS
    with pytest.raises(TensorContractError, match="expert_map"):
        flash_dmoe(x, logits, *layer, top_k=TOP_K, expert_map=local)


def test_a_layer_that_breaks_the_contract_is_refused_after_one_that_did_not(
    layer: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, logits, out = torch.randn(3, HIDDEN), torch.randn(3, EXPERTS), torch.empty(3, HIDDEN)
    for _ in range(2):
        flash_dmoe(x, logits, *layer, top_k=TOP_K, out=out)
    wide = torch.zeros(3, 2 * HIDDEN)
    for wrong_x, wrong_logits, top_k, wrong_out in (
        (x.double(), logits, TOP_K, out),
        (x[:2], logits, TOP_K, out),
        (wide[:, ::2], logits, TOP_K, out),
        (x, logits.int(), TOP_K, out),
        (x, logits[:2], TOP_K, out),
        (x, logits[:, :3], TOP_K, out),
        (x, logits.T.contiguous().T, TOP_K, out),
        (x, logits, EXPERTS + 1, out),
        (x, logits, TOP_K, out[:, :32]),
        (x, logits, TOP_K, wide[:, ::2]),
    ):
        with pytest.raises(TensorContractError):
            flash_dmoe(wrong_x, wrong_logits, *layer, top_k=top_k, out=wrong_out)
