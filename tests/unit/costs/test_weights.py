from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.weights import (
    device_weight_bytes,
    splits_over,
    stored_linear_bits,
    weight_element_bytes,
    weight_parts,
)
from tests import builders

MODELS = ("qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3_fp8", "deepseek_v3_bf16")


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_the_stored_weights(request, name):
    model = request.getfixturevalue(name)
    parts = weight_parts(model)
    assert parts.total == pytest.approx(model.weight_bytes, abs=4)
    assert min(dataclasses.astuple(parts)) > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_one_device_holds_the_whole_model(request, name, expert_parallel):
    model = request.getfixturevalue(name)
    held = device_weight_bytes(model, weight_parts(model), num_devices=1, expert_parallel=expert_parallel)
    assert held == pytest.approx(model.weight_bytes, abs=8)


@pytest.mark.parametrize("name", MODELS)
def test_all_devices_together_hold_the_model_and_the_replicas(request, name):
    model = request.getfixturevalue(name)
    parts = weight_parts(model)
    held = 8 * device_weight_bytes(model, parts, num_devices=8, expert_parallel=False)
    copies = 7 * (parts.replicated + parts.kv_projections)
    assert model.weight_bytes < held <= (model.weight_bytes + copies) * 1.001


def test_experts_are_the_same_bytes_under_tp_and_ep_when_they_divide(qwen3_30b_a3b):
    parts = weight_parts(qwen3_30b_a3b)
    tp, ep = (device_weight_bytes(qwen3_30b_a3b, parts, num_devices=4, expert_parallel=ep) for ep in (False, True))
    assert tp == ep


def test_fullest_ep_device_holds_one_expert_more_when_they_do_not_divide(qwen3_30b_a3b):
    model = dataclasses.replace(qwen3_30b_a3b, num_experts=130)
    parts = weight_parts(model)
    tp, ep = (device_weight_bytes(model, parts, num_devices=4, expert_parallel=ep) for ep in (False, True))
    assert ep - tp == pytest.approx(parts.experts * (33 / 130 - 1 / 4), rel=1e-6)


def test_fp8_experts_shrink_to_half_and_their_scales(qwen3_30b_a3b):
    parts = weight_parts(qwen3_30b_a3b, expert_bits=8)
    assert parts.experts == round(qwen3_30b_a3b.expert_params * (1 + 4 / 128**2))
    assert parts.linears == weight_parts(qwen3_30b_a3b).linears


def test_fp8_linears_leave_embeddings_router_and_norms_alone(qwen3_30b_a3b):
    stored, converted = weight_parts(qwen3_30b_a3b), weight_parts(qwen3_30b_a3b, linear_bits=8)
    assert converted.linears == pytest.approx(stored.linears / 2, rel=0.001)
    assert converted.kv_projections == pytest.approx(stored.kv_projections / 2, rel=0.001)
    assert (converted.vocabulary, converted.replicated) == (stored.vocabulary, stored.replicated)


def test_quantised_embeddings_do_not_make_a_part_negative(qwen3_30b_a3b):
    # Everything outside the experts at 4 bits: fewer bytes than embeddings and router take in BF16.
    other_params = qwen3_30b_a3b.total_params - qwen3_30b_a3b.expert_params
    model = dataclasses.replace(
        qwen3_30b_a3b, weight_bytes=qwen3_30b_a3b.expert_weight_bytes + other_params // 8, weight_bits=4
    )
    parts = weight_parts(model)
    assert min(dataclasses.astuple(parts)) >= 0
    assert parts.total == pytest.approx(model.weight_bytes, abs=4)


def test_vocabulary_is_padded_before_it_is_split(qwen3_30b_a3b):
    odd = dataclasses.replace(qwen3_30b_a3b, vocab_size=151937)
    even_bytes, odd_bytes = (
        device_weight_bytes(model, weight_parts(model), num_devices=2, expert_parallel=False)
        for model in (qwen3_30b_a3b, odd)
    )
    assert odd_bytes > even_bytes


@pytest.mark.parametrize(("devices", "why"), [(3, "32 attention.* 3$"), (64, "32 attention.* 64$")])
def test_head_counts_that_do_not_divide_are_named(qwen3_30b_a3b, devices, why):
    divides, why_not = splits_over(qwen3_30b_a3b, devices, expert_parallel=False)
    assert not divides
    assert re.match(why, why_not)


def test_expert_width_must_divide_under_tp_but_not_under_ep(qwen3_30b_a3b):
    model = dataclasses.replace(qwen3_30b_a3b, moe_intermediate_size=762)
    divides, why = splits_over(model, 4, expert_parallel=False)
    assert not divides
    assert "expert width 762 " in why
    assert splits_over(model, 4, expert_parallel=True) == (True, "")


def test_key_value_heads_must_divide_or_be_divided(qwen3_30b_a3b):
    attention = dataclasses.replace(qwen3_30b_a3b.attention, num_heads=24, num_kv_heads=6)
    model = dataclasses.replace(qwen3_30b_a3b, attention=attention)
    divides, why = splits_over(model, 4, expert_parallel=True)
    assert not divides
    assert "6 key/value heads " in why
    assert splits_over(model, 3, expert_parallel=True)[0]
    assert splits_over(model, 12, expert_parallel=True)[0]


@given(st.floats(1, 32))
def test_scales_are_stored_below_sixteen_bits_only(bits):
    scales = weight_element_bytes(bits) - bits / 8
    assert scales == pytest.approx(4 / 128**2 if bits < 16 else 0)


@pytest.mark.parametrize(
    ("model", "bits"),
    [
        (builders.gpt_oss_120b(), 16),
        (builders.qwen3_30b_a3b(), 16),
        (builders.qwen3_30b_a3b_fp8(), 8),
        (builders.qwen3_30b_a3b(expert_bytes_per_weight=0.5625, linear_bytes_per_weight=1.0, quant_method="gptq"), 8),
    ],
    ids=["experts-alone", "unquantised", "fp8-blocks", "other-bits"],
)
def test_the_bits_of_the_linears_are_those_that_the_checkpoint_stores(model, bits):
    assert stored_linear_bits(model) == pytest.approx(bits, abs=0.003)
    parts = weight_parts(model, linear_bits=stored_linear_bits(model))
    assert parts.linears == pytest.approx(weight_parts(model).linears, rel=1e-4)
