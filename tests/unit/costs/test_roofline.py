from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.roofline import (
    DecodeStep,
    decode_step_bytes,
    decode_step_floor_us,
    expected_experts_hit,
    experts_read_ratio,
    memory_bandwidth,
    moe_layer_weight_bytes,
    peak_flops,
)
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.quantity import Source

# One layer of Qwen3-30B-A3B: tokens, experts hit, MB in BF16.
READ_TABLE = [(1, 8.0, 75.5), (8, 51.6, 487), (64, 125.9, 1189), (512, 128, 1208), (4096, 128, 1208)]


def bytes_of(model: ModelSpec, **step: Any) -> float:
    return decode_step_bytes(DecodeStep(model=model, **step)).total


@pytest.mark.parametrize(("tokens", "hit", "megabytes"), READ_TABLE)
def test_what_one_layer_reads_is_within_one_per_cent_of_the_table(qwen3_30b_a3b, tokens, hit, megabytes):
    assert expected_experts_hit(128, 8, tokens) == pytest.approx(hit, rel=0.01)
    read = moe_layer_weight_bytes(qwen3_30b_a3b, tokens, expert_bits=16)
    assert read / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_whole_model_floor_at_batch_one(qwen3_30b_a3b, h200_measured):
    step: dict[str, Any] = {"batch": 1, "context": 0, "num_gpus": 1}
    bf16 = decode_step_floor_us(DecodeStep(model=qwen3_30b_a3b, **step, expert_bits=16, linear_bits=16), h200_measured)
    fp8 = decode_step_floor_us(DecodeStep(model=qwen3_30b_a3b, **step, expert_bits=8, linear_bits=8), h200_measured)
    assert bf16.value == pytest.approx(1410, rel=0.01)
    assert fp8.value == pytest.approx(780, rel=0.01)
    assert bf16.source is Source.MODELLED


def test_gpu_without_fp8_computes_fp8_weights_at_its_bf16_rate():
    gpu = load_catalog_entry("a100_80gb").gpu
    assert peak_flops(gpu, 8) == gpu.dense_flops["bf16"]


def test_unknown_rate_is_an_error_not_a_guess(h200_measured):
    bare = dataclasses.replace(
        h200_measured, dense_flops={}, memory_bandwidth=dataclasses.replace(h200_measured.memory_bandwidth, value=0.0)
    )
    with pytest.raises(UnsupportedError, match="bf16 rate"):
        peak_flops(bare, 16)
    with pytest.raises(UnsupportedError, match="memory bandwidth"):
        memory_bandwidth(bare)


@given(experts=st.integers(1, 1024), top_k=st.integers(1, 32), tokens=st.integers(1, 4096))
def test_experts_hit_lie_between_one_tokens_and_all(experts, top_k, tokens):
    top_k = min(top_k, experts)
    hit = expected_experts_hit(experts, top_k, tokens)
    assert top_k <= hit * (1 + 1e-12) + 1e-9
    assert hit <= min(experts, top_k * tokens) * (1 + 1e-12)
    assert hit <= expected_experts_hit(experts, top_k, tokens + 1) * (1 + 1e-12)


def test_experts_hit_agrees_with_drawing_at_random():
    draw = random.Random(7)
    trials = [len({e for _ in range(8) for e in draw.sample(range(128), 8)}) for _ in range(2000)]
    assert sum(trials) / len(trials) == pytest.approx(expected_experts_hit(128, 8, 8), rel=0.01)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(0, 0, 5), (8, 2, 0), (0, 2, 3)])
def test_nothing_is_hit_without_experts_or_tokens(experts, top_k, tokens):
    assert expected_experts_hit(experts, top_k, tokens) == 0


def test_fp8_experts_read_just_under_half(qwen3_30b_a3b):
    ratio = experts_read_ratio(qwen3_30b_a3b, batch=64, from_bits=16, to_bits=8)
    assert ratio.value == pytest.approx(2 / (1 + 4 / 128**2))
    assert (ratio.unit, ratio.source) == ("ratio", Source.MODELLED)


def test_a_tied_embedding_is_read_as_the_head(qwen3_30b_a3b):
    step = {"batch": 1, "context": 0, "num_gpus": 1, "expert_bits": 16, "linear_bits": 16}
    model = qwen3_30b_a3b
    embedding_bytes = 2 * model.embedding_params
    tied = dataclasses.replace(
        model,
        lm_head_params=0,
        total_params=model.total_params - model.lm_head_params,
        weight_bytes=model.weight_bytes - embedding_bytes,
    )
    assert bytes_of(tied, **step) == pytest.approx(bytes_of(model, **step))


def test_a_longer_context_costs_its_cache(qwen3_30b_a3b):
    step = {"batch": 3, "num_gpus": 1, "expert_bits": 16, "linear_bits": 16}
    model = qwen3_30b_a3b
    more = bytes_of(model, context=1100, **step) - bytes_of(model, context=100, **step)
    assert more == pytest.approx(3 * 1000 * model.kv_bytes_per_token)


def test_a_full_window_stops_growing(qwen3_30b_a3b):
    step = {"batch": 1, "num_gpus": 1, "expert_bits": 16, "linear_bits": 16}
    attention = dataclasses.replace(qwen3_30b_a3b.attention, sliding_window=128, num_windowed_layers=48)
    model = dataclasses.replace(qwen3_30b_a3b, attention=attention)
    assert bytes_of(model, context=100_000, **step) == bytes_of(model, context=128, **step)


def test_two_gpus_read_less_than_one_but_not_half(qwen3_30b_a3b):
    step = {"batch": 8, "context": 1000, "expert_bits": 16, "linear_bits": 16}
    one = bytes_of(qwen3_30b_a3b, num_gpus=1, **step)
    two = bytes_of(qwen3_30b_a3b, num_gpus=2, **step)
    assert one / 2 < two < one
