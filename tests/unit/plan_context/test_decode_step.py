from __future__ import annotations

import re

import pytest

from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import full_length, held_at_once, least_step_us
from moe_optimizer.specs.quantity import Source
from tests.builders import context, decided_by, gpus, profile_with, qwen3_30b_a3b


def split(name: str, count: int, **parallelism: int) -> PlanContext:
    profile = profile_with(passes={"parallelism": parallelism})
    return decided_by(context(qwen3_30b_a3b(), gpus(name, count), profile), "parallelism")


def least_us(ctx: PlanContext, requests: int) -> float:
    return least_step_us(ctx, requests, kv_bits=16, expert_bits=None, linear_bits=None).value


def test_the_cache_holds_whole_requests():
    ctx = split("h100_sxm", 1)
    tokens = ctx.memory(num_devices=1).kv_tokens
    assert held_at_once(ctx, num_devices=1) * full_length(ctx) <= tokens < (held_at_once(ctx) + 1) * full_length(ctx)


def test_one_gpu_exchanges_nothing():
    step = least_step_us(split("h100_sxm", 1), 64, kv_bits=16, expert_bits=None, linear_bits=None)
    assert step.source is Source.MODELLED
    assert "all-reduces" not in step.ref


def test_two_all_reduces_a_layer_are_at_least_what_they_take_to_start():
    ctx = split("h100_sxm", 8)
    step = least_step_us(ctx, 1, kv_bits=16, expert_bits=None, linear_bits=None)
    assert step.source is Source.MODELLED
    assert re.search("96 all-reduces.*6 us.*nvlink", step.ref)
    assert step.value > 96 * 5.5


def test_copies_that_share_the_experts_take_less_time_than_one_gpu_with_all_of_them():
    alone, copies = split("h200", 1), split("h200", 2, data_parallel_size=2, tensor_parallel_size=1)
    assert least_us(copies, 64) < least_us(alone, 64)


@pytest.mark.parametrize("bits", [{"kv_bits": 8}, {"expert_bits": 8}, {"linear_bits": 8}])
def test_every_kind_of_fewer_bits_takes_less_time(bits):
    fields = {"kv_bits": 16, "expert_bits": None, "linear_bits": None}
    ctx = split("h200", 1)
    assert least_step_us(ctx, 64, **(fields | bits)).value < least_step_us(ctx, 64, **fields).value
