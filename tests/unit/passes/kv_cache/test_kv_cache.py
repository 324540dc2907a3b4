from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.memory import sequence_kv_bytes
from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.plan_context.context import PlanContext
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    gpt_oss_120b,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    tiny_moe,
)

BEFORE = ("parallelism", "dual_batch_overlap", "scheduler", "graph_capture")
ON = {"kv_cache": (Wish.ON, "flag --enable-kv-cache")}


def before(model, hardware, max_model_len: int | None = None, **changes) -> PlanContext:
    ctx = context(model, hardware, **changes)
    if max_model_len is not None:
        ctx = dataclasses.replace(ctx, workload=dataclasses.replace(ctx.workload, max_model_len=max_model_len))
    return decided_by(ctx, *BEFORE)


def decide(model=None, hardware=None, **changes) -> Decision:
    ctx = before(model or qwen3_30b_a3b(), hardware or gpus("h100_sxm"), **changes)
    return decided_by(ctx, "kv_cache").decided["kv_cache"]


def test_the_models_own_type_is_kept_unless_fp8_is_asked_for():
    decision = decide()
    assert (decision.status, decision.vllm_args.words, decision.params_as(KvCacheParams).kv_bits) == (
        Status.OFF,
        (),
        16,
    )


@pytest.mark.parametrize("changes", [{"wishes": ON}, {"profile": profile_with("aggressive")}])
def test_fp8_by_flag_or_by_the_aggressive_profile(changes):
    decision = decide(**changes)
    assert decision.vllm_args.words == ("--kv-cache-dtype", "fp8")
    assert decision.params_as(KvCacheParams).kv_bits == 8
    assert decision.gain is not None
    assert decision.gain.ratio.value == 2.0


@pytest.mark.parametrize(
    ("model", "hardware", "why"),
    [
        (deepseek_v3(), gpus("h200", 8), "mla attention"),
        (gpt_oss_120b(), gpus("h100_sxm"), "sliding-window attention"),
        (qwen3_30b_a3b(), gpus("a100_80gb"), "found sm_80"),
    ],
    ids=["mla", "windowed", "a100"],
)
def test_fp8_that_cannot_be_is_refused_by_name_and_left_out_by_profile(model, hardware, why):
    asked = decide(model, hardware, wishes=ON)
    assert asked.status is Status.REFUSED
    assert asked.params_as(KvCacheParams).kv_bits == 16
    assert why in asked.reason
    profile = decide(model, hardware, profile=profile_with("aggressive"))
    assert profile.status is Status.OFF
    assert why in profile.reason


@pytest.mark.parametrize(("dtype", "bits"), [("fp8_e5m2", 8), ("auto", 16), ("bfloat16", 16)])
def test_the_users_own_type_is_what_memory_is_planned_with(dtype, bits):
    assert decide(pinned={"--kv-cache-dtype": dtype}).params_as(KvCacheParams).kv_bits == bits
    off = decide(pinned={"--kv-cache-dtype": dtype}, wishes={"kv_cache": (Wish.OFF, "profile mine")})
    assert (off.status, off.params_as(KvCacheParams).kv_bits) == (Status.OFF, bits)


def test_a_length_that_fits_is_left_alone():
    params = decide().params_as(KvCacheParams)
    assert (params.wanted_model_len, params.max_model_len) == (40960, 40960)


def test_a_length_that_does_not_fit_is_cut_to_what_the_cache_holds():
    params = decide(qwen3_30b_a3b(max_position=262144)).params_as(KvCacheParams)
    assert params.wanted_model_len == 262144
    assert params.max_model_len is not None
    assert 100_000 < params.max_model_len < 137_000
    assert params.max_model_len % 128 == 0


@given(wanted=st.integers(1, 4_000_000))
def test_the_length_is_the_wish_or_fits_the_cache(wanted):
    ctx = before(qwen3_30b_a3b(), gpus("h100_sxm"), max_model_len=wanted)
    length = decided_by(ctx, "kv_cache").decided["kv_cache"].params_as(KvCacheParams).max_model_len
    assert length is not None
    assert 1 <= length <= wanted
    terms = ctx.memory_terms(16)
    assert sequence_kv_bytes(ctx.memory_request(**terms), length) <= ctx.memory(**terms).kv_cache_bytes


def test_the_cpu_build_gets_whole_gigabytes_for_the_workload_and_not_all_of_the_memory():
    decision = decide(tiny_moe(), cpu_machine(gib=16))
    assert decision.params_as(KvCacheParams).host_cache_gib == 1
    large = decide(qwen3_30b_a3b(), cpu_machine(gib=256))
    # 256 requests of 1536 tokens at 96 KiB are 36 GiB.
    assert large.params_as(KvCacheParams).host_cache_gib == 36


def test_the_cpu_build_takes_its_memory_from_one_numa_node():
    model = qwen3_30b_a3b()
    cache_gib = decide(model, cpu_machine(gib=256, node_gib=80)).params_as(KvCacheParams).host_cache_gib
    assert cache_gib is not None
    assert 0 < cache_gib * 2**30 <= 80 * 2**30 - model.weight_bytes


def test_fp32_on_the_cpu_needs_32_bits_an_element():
    assert decide(tiny_moe(), cpu_machine(), dtype="float32").params_as(KvCacheParams).kv_bits == 32


def test_how_many_requests_the_cache_really_holds_is_said_where_it_is_fewer_than_planned():
    (evidence,) = decide().evidence
    assert evidence.startswith("the cache holds 8")  # about 137,000 tokens / 1536
    assert decide(hardware=gpus("h100_sxm", 8)).evidence == ()
