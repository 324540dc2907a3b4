from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.memory import (
    GIB,
    MIN_KV_TOKENS,
    MemoryRequest,
    activation_bytes,
    kv_bytes_per_token,
    plan_memory,
    sequence_kv_bytes,
    sequences_held,
    workspace_bytes,
)
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.specs.model import ModelSpec

H100 = int(load_catalog_entry("h100_sxm").gpu.memory.value)


def request_for(model: ModelSpec, **changes: Any) -> MemoryRequest:
    defaults: dict[str, Any] = {
        "model": model,
        "device_bytes": H100,
        "num_devices": 1,
        "gpu_memory_utilization": 0.90,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "max_model_len": None,
    }
    return MemoryRequest(**(defaults | changes))


def fits_on(count: int, model: ModelSpec, **changes: Any) -> bool:
    """Whether so many devices hold a model in slices."""
    return plan_memory(request_for(model, num_devices=count, **changes)).fits


def test_qwen3_30b_fits_one_h100_in_bf16_with_the_cache_it_really_leaves(qwen3_30b_a3b):
    plan = plan_memory(request_for(qwen3_30b_a3b, max_model_len=40960))
    assert plan.fits
    assert plan.budget_bytes == pytest.approx(76.97e9, rel=0.001)
    assert plan.weight_bytes == pytest.approx(61.06e9, rel=0.001)
    # 77.0 GB less 61.1 GB of weights less 2.5 GB of the rest, at 96 KiB a token.
    assert 12.5e9 < plan.kv_cache_bytes < 14.5e9
    assert plan.kv_bytes_per_token == 98304
    assert 127_000 < plan.kv_tokens < 147_000


def test_a_published_vllm_log_is_met_within_two_per_cent(qwen3_30b_a3b):
    # One 80 GB card at 0.90, a vLLM that did not yet set CUDA graph memory aside, its default of 2048 tokens:
    # "Model loading took 56.9342 GiB", "GPU KV cache size: 150,272 tokens".
    plan = plan_memory(request_for(qwen3_30b_a3b, max_num_batched_tokens=2048, cuda_graphs=False))
    assert plan.weight_bytes / GIB == pytest.approx(56.93, rel=0.005)
    assert plan.kv_tokens == pytest.approx(150_272, rel=0.02)


def test_qwen3_30b_does_not_fit_one_h100_when_the_cache_cannot_hold_its_longest_sequence(qwen3_30b_a3b):
    assert [count for count in (1, 2) if fits_on(count, qwen3_30b_a3b, max_model_len=262_144)] == [2]


def test_deepseek_v3_needs_sixteen_h100_in_fp8_and_thirty_two_in_bf16(deepseek_v3_fp8, deepseek_v3_bf16):
    fitting = [[count for count in (8, 16, 32) if fits_on(count, each)] for each in (deepseek_v3_fp8, deepseek_v3_bf16)]
    assert fitting == [[16, 32], [32]]
    assert plan_memory(request_for(deepseek_v3_fp8)).unused_bytes < -500e9


def test_deepseek_v3_in_fp8_fits_eight_h200(deepseek_v3_fp8):
    h200 = int(load_catalog_entry("h200").gpu.memory.value)
    assert [count for count in (4, 8) if fits_on(count, deepseek_v3_fp8, device_bytes=h200)] == [8]


def test_mixtral_8x7b_in_bf16_needs_two_h100(mixtral_8x7b):
    assert not fits_on(1, mixtral_8x7b)
    assert fits_on(2, mixtral_8x7b, max_model_len=32768)


def test_mixtral_8x7b_fits_one_h100_with_fp8_experts(mixtral_8x7b):
    assert fits_on(1, mixtral_8x7b, expert_bits=8)


def test_a_count_that_the_heads_do_not_divide_by_does_not_fit(qwen3_30b_a3b):
    plan = plan_memory(request_for(qwen3_30b_a3b, num_devices=3))
    assert plan.kv_cache_bytes > 0
    assert not plan.fits


def test_fp8_cache_holds_twice_the_tokens(qwen3_30b_a3b):
    bf16 = plan_memory(request_for(qwen3_30b_a3b))
    fp8 = plan_memory(request_for(qwen3_30b_a3b, kv_bits=8))
    assert fp8.kv_tokens == pytest.approx(2 * bf16.kv_tokens, abs=1)


def test_grouped_heads_are_replicated_once_there_are_fewer_than_devices(qwen3_30b_a3b):
    per_token = [kv_bytes_per_token(request_for(qwen3_30b_a3b, num_devices=n)) for n in (1, 2, 4, 8)]
    assert per_token == [98304, 49152, 24576, 24576]


def test_the_latent_of_mla_is_whole_on_every_device(deepseek_v3_fp8):
    per_token = {kv_bytes_per_token(request_for(deepseek_v3_fp8, num_devices=n)) for n in (1, 8, 16)}
    assert per_token == {61 * 576 * 2}


def test_a_latent_in_a_hybrid_model_is_whole_on_every_device(deepseek_v3_fp8):
    attention = dataclasses.replace(deepseek_v3_fp8.attention, kind="hybrid")
    hybrid = dataclasses.replace(deepseek_v3_fp8, attention=attention)
    assert kv_bytes_per_token(request_for(hybrid, num_devices=8)) == 61 * 576 * 2


def test_a_windowed_layer_stops_growing_at_its_window(qwen3_30b_a3b):
    attention = dataclasses.replace(qwen3_30b_a3b.attention, sliding_window=1024, num_windowed_layers=24)
    model = dataclasses.replace(qwen3_30b_a3b, attention=attention)
    full = sequence_kv_bytes(request_for(qwen3_30b_a3b), 100_000)
    windowed = sequence_kv_bytes(request_for(model), 100_000)
    assert windowed == pytest.approx(full * (100_000 + 1024 + 8192) / 200_000, rel=1e-6)
    assert sequence_kv_bytes(request_for(model), 1000) == sequence_kv_bytes(request_for(qwen3_30b_a3b), 1000)


def test_vllm_keeps_all_tokens_of_a_model_with_chunks_of_attention(qwen3_30b_a3b):
    attention = dataclasses.replace(qwen3_30b_a3b.attention, sliding_window=1024, num_windowed_layers=24, chunked=True)
    model = dataclasses.replace(qwen3_30b_a3b, attention=attention)
    assert sequence_kv_bytes(request_for(model), 100_000) == sequence_kv_bytes(request_for(qwen3_30b_a3b), 100_000)


def test_recurrent_state_is_set_aside_for_every_running_sequence(qwen3_30b_a3b):
    state = 10_000_000
    hybrid = dataclasses.replace(qwen3_30b_a3b, state_bytes_per_sequence=state)
    without, with_state = (plan_memory(request_for(model, max_num_seqs=16)) for model in (qwen3_30b_a3b, hybrid))
    assert without.kv_tokens - with_state.kv_tokens == pytest.approx(16 * state / 98304, abs=1)


def test_recurrent_state_is_set_aside_only_for_the_sequences_that_the_cache_holds(qwen3_30b_a3b):
    # Qwen3.5 on one H100: the state of 256 sequences is more than the cache has, that of those that run is not.
    hybrid = dataclasses.replace(qwen3_30b_a3b, state_bytes_per_sequence=100_000_000)
    request = request_for(hybrid, max_model_len=1152)
    plan = plan_memory(request)
    each = 100_000_000 + 1152 * 98304
    assert sequences_held(request, plan.kv_cache_bytes, 1152) == plan.kv_cache_bytes // each
    assert plan.kv_tokens == pytest.approx(1152 * plan.kv_cache_bytes / each, abs=1)


def test_a_decoding_sequence_keeps_of_a_windowed_layer_no_more_than_the_window(qwen3_30b_a3b):
    attention = dataclasses.replace(qwen3_30b_a3b.attention, sliding_window=128, num_windowed_layers=24)
    model = dataclasses.replace(qwen3_30b_a3b, attention=attention)
    cache = 10_000_000_000
    full = sequences_held(request_for(qwen3_30b_a3b), cache, 1152)
    assert full == cache // (1152 * 98304)
    assert sequences_held(request_for(model), cache, 1152) == cache // ((1152 + 128 + 16) * 98304 // 2)


def test_a_model_without_attention_has_no_growing_cache(qwen3_30b_a3b):
    attention = dataclasses.replace(
        qwen3_30b_a3b.attention, kind="none", num_heads=0, num_kv_heads=0, head_dim=0, num_attention_layers=0
    )
    model = dataclasses.replace(
        qwen3_30b_a3b, attention=attention, kv_bytes_per_token=0, kv_params=0, state_bytes_per_sequence=1000
    )
    plan = plan_memory(request_for(model))
    assert plan.fits
    assert (plan.kv_tokens, plan.kv_bytes_per_token) == (0, 0)
    assert sequence_kv_bytes(request_for(model), 5000) == 1000


def test_sampling_outgrows_the_forward_pass_at_many_sequences(qwen3_30b_a3b):
    few = activation_bytes(request_for(qwen3_30b_a3b, max_num_seqs=16, max_num_batched_tokens=2048))
    many = activation_bytes(request_for(qwen3_30b_a3b, max_num_seqs=1024, max_num_batched_tokens=2048))
    assert few < many == 1024 * 151936 * 4 * 4


def test_workspace_grows_with_a_group_and_with_graphs(qwen3_30b_a3b):
    eager = workspace_bytes(request_for(qwen3_30b_a3b, cuda_graphs=False))
    graphs = workspace_bytes(request_for(qwen3_30b_a3b))
    group = workspace_bytes(request_for(qwen3_30b_a3b, num_devices=2))
    assert eager < graphs < group


def test_ref_names_the_split_and_what_is_assumed(qwen3_30b_a3b):
    ref = plan_memory(request_for(qwen3_30b_a3b, num_devices=2, expert_parallel=True)).ref
    assert "2 ways (EP)" in ref
    assert "assumed" in ref


requests = st.fixed_dictionaries(
    {
        "device_bytes": st.integers(4 * GIB, 200 * GIB),
        "num_devices": st.sampled_from([1, 2, 4, 8, 16]),
        "gpu_memory_utilization": st.floats(0.3, 1.0),
        "max_num_batched_tokens": st.integers(64, 65536),
        "max_num_seqs": st.integers(1, 2048),
        "max_model_len": st.none() | st.integers(1, 200_000),
        "expert_bits": st.sampled_from([None, 8, 16]),
        "linear_bits": st.sampled_from([None, 8, 16]),
        "kv_bits": st.sampled_from([8, 16]),
        "expert_parallel": st.booleans(),
        "cuda_graphs": st.booleans(),
    }
)


@given(requests)
def test_the_terms_add_up_to_the_budget_or_miss_it_by_the_unused_bytes(qwen3_30b_a3b, changes):
    plan = plan_memory(request_for(qwen3_30b_a3b, **changes))
    terms = (plan.weight_bytes, plan.activation_bytes, plan.workspace_bytes, plan.kv_cache_bytes)
    assert all(term >= 0 for term in terms)
    assert sum(terms) + plan.unused_bytes == plan.budget_bytes
    assert plan.unused_bytes <= 0
    if plan.fits:
        assert plan.unused_bytes == 0
        assert plan.kv_tokens >= min(changes["max_model_len"] or MIN_KV_TOKENS, MIN_KV_TOKENS) - 1
    assert plan.kv_tokens * plan.kv_bytes_per_token <= plan.kv_cache_bytes


@given(requests)
def test_one_more_doubling_of_devices_never_leaves_fewer_tokens(qwen3_30b_a3b, changes):
    # Two to four and on: from one to two the communication buffers come in, which a tiny budget may feel.
    changes = changes | {"num_devices": max(2, changes["num_devices"])}
    once = plan_memory(request_for(qwen3_30b_a3b, **changes))
    twice = plan_memory(request_for(qwen3_30b_a3b, **(changes | {"num_devices": 2 * changes["num_devices"]})))
    assert twice.kv_tokens >= once.kv_tokens
    assert twice.weight_bytes <= once.weight_bytes


@given(requests, st.integers(1, 64 * GIB))
def test_more_memory_never_leaves_fewer_tokens(qwen3_30b_a3b, changes, extra):
    more = changes | {"device_bytes": changes["device_bytes"] + extra}
    less_plan, more_plan = (plan_memory(request_for(qwen3_30b_a3b, **each)) for each in (changes, more))
    assert more_plan.kv_tokens >= less_plan.kv_tokens
    assert more_plan.fits or not less_plan.fits


def test_replicas_of_experts_are_weights(qwen3_30b_a3b):
    shape = {"num_devices": 8, "expert_parallel": True}
    without = plan_memory(request_for(qwen3_30b_a3b, **shape))
    copied = plan_memory(request_for(qwen3_30b_a3b, **shape, expert_copies=16))
    # Two more of 128 experts on each of eight devices.
    assert copied.weight_bytes - without.weight_bytes == pytest.approx(
        2 / 128 * qwen3_30b_a3b.expert_weight_bytes, rel=1e-6
    )
    assert "16 replicas" in copied.ref


def test_the_load_balancer_takes_room_without_replicas_too(qwen3_30b_a3b):
    shape = {"num_devices": 8, "expert_parallel": True}
    off, on = (workspace_bytes(request_for(qwen3_30b_a3b, **shape, expert_copies=copies)) for copies in (None, 0))
    one_layer = qwen3_30b_a3b.expert_weight_bytes / 48 / 8
    tables = 48 * 128 * (1000 * 4 + 1024 * 8)
    assert on - off == pytest.approx(one_layer + tables, rel=1e-6)


def test_devices_of_all_copies_share_the_experts(qwen3_30b_a3b):
    shape = {"num_devices": 2, "expert_parallel": True}
    alone = plan_memory(request_for(qwen3_30b_a3b, **shape))
    copies = plan_memory(request_for(qwen3_30b_a3b, **shape, data_parallel_size=4))
    # 16 of 128 experts instead of 64.
    assert alone.weight_bytes - copies.weight_bytes == pytest.approx(
        48 / 128 * qwen3_30b_a3b.expert_weight_bytes, rel=1e-6
    )


def test_copies_without_expert_parallelism_share_slices_of_the_experts(qwen3_30b_a3b):
    alone = plan_memory(request_for(qwen3_30b_a3b, num_devices=2))
    copies = plan_memory(request_for(qwen3_30b_a3b, num_devices=2, data_parallel_size=4))
    # An eighth of every expert instead of a half, as vLLM slices them over the devices of all copies.
    assert alone.weight_bytes - copies.weight_bytes == pytest.approx(
        3 / 8 * qwen3_30b_a3b.expert_weight_bytes, rel=1e-6
    )


@pytest.mark.parametrize("others", [{"num_devices": 2}, {"pipeline_stages": 2}, {"data_parallel_size": 2}])
def test_whoever_exchanges_with_other_gpus_needs_buffers_and_says_so(qwen3_30b_a3b, others):
    alone = plan_memory(request_for(qwen3_30b_a3b, cuda_graphs=False))
    group = plan_memory(request_for(qwen3_30b_a3b, cuda_graphs=False, **others))
    assert group.workspace_bytes - alone.workspace_bytes == pytest.approx((0.55 - 0.13) * 2**30, rel=1e-6)
    assert ("0.13 GiB" in alone.ref, "0.55 GiB" in group.ref) == (True, True)


def test_our_kernels_buffers_hold_no_more_tokens_than_a_forward_has(qwen3_30b_a3b):
    few = request_for(qwen3_30b_a3b, max_num_batched_tokens=512, kernel_tokens=512, max_num_seqs=1)
    many = dataclasses.replace(few, kernel_tokens=1 << 30)
    assert activation_bytes(few) == activation_bytes(many)
