"""Attention of few requests' decode steps: only where it is asked for, and where the kernel fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.ops.paged_decode import HEAD_SIZES, MAX_QUERIES_PER_KV_HEAD, MAX_TOKENS
from moe_optimizer.passes.decode_attention import decode_attention as pass_module
from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes
from moe_optimizer.plan.decision import Applier, Decision, Status
from tests.builders import context, cpu_machine, decided_by, deepseek_v3, gpus, profile_with, qwen3_30b_a3b, software

BUILT = software(cuda_ops=("fused_experts", "paged_decode"))
ASKED = resolve_wishes(["decode-attention"], [])
QWEN = qwen3_30b_a3b()


def decide(model=QWEN, hardware=None, passes=None, **changes) -> Decision:
    profile = profile_with(passes=passes or {})
    ctx = context(model, hardware or gpus("h100_sxm", 1), profile, **({"wishes": ASKED, "software": BUILT} | changes))
    return decided_by(ctx, *PASS_NAMES).decided["decode_attention"]


def heads(**changes: Any):
    return dataclasses.replace(QWEN, attention=dataclasses.replace(QWEN.attention, **changes))


def test_asked_for_the_plugin_puts_it_into_the_layers():
    decision = decide()
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.value == "up to 8 requests"
    assert decision.vllm_args.words == ()
    assert decide(hardware=gpus("h200", 2)).status is Status.ON


def test_not_asked_for_it_is_off_and_says_that_it_did_not_run():
    decision = decide(wishes={})
    assert decision.status is Status.OFF
    assert "not run on a GPU" in decision.reason
    assert "--enable-decode-attention" in decision.reason


def test_the_profile_can_ask_for_it():
    assert decide(wishes={}, passes={"decode_attention": {"mode": "on"}}).status is Status.ON


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": cpu_machine()}, "GPUs only"),
        ({"hardware": gpus("a100_80gb", 1)}, "found 8.0"),
        ({"dtype": "float16"}, "float16"),
        ({"model": deepseek_v3(), "hardware": gpus("h200", 8)}, "mla"),
        ({"model": heads(head_dim=256)}, "found 256"),
        ({"model": heads(num_kv_heads=1)}, "found 32"),
        ({"model": heads(num_windowed_layers=QWEN.attention.num_attention_layers, sliding_window=128)}, "window"),
        ({"passes": {"kv_cache": {"dtype": "fp8"}}}, "the KV cache is fp8"),
        ({"passes": {"kv_cache": {"tiering": "on"}}}, "KV tiering"),
        ({"passes": {"disaggregation": {"mode": "on"}}, "hardware": gpus("h200", 2)}, "disaggregation"),
        ({"pinned": {"--kv-transfer-config": "{}"}}, "--kv-transfer-config"),
        ({"pinned": {"--speculative-config": "{}"}}, "speculation"),
    ],
    ids=["CPU", "Ampere", "FP16", "MLA", "wide heads", "too many queries", "windows", "FP8 cache", "tiering",
         "disaggregation", "connector", "drafts"],
)  # fmt: skip
def test_where_it_cannot_be_the_reason_is_said(changes, reason):
    decision = decide(**changes)
    assert decision.status is Status.REFUSED
    assert reason in decision.reason


def test_layers_without_a_window_are_enough():
    some = heads(num_windowed_layers=QWEN.attention.num_attention_layers - 1, sliding_window=128)
    assert decide(model=some).status is Status.ON


def test_where_bits_must_not_depend_on_other_requests_it_is_refused():
    installed = dataclasses.replace(BUILT, kernel_environment="VLLM_BATCH_INVARIANT=1")
    assert "VLLM_BATCH_INVARIANT" in decide(software=installed).reason


def test_a_build_without_the_kernel_is_named():
    assert "no CUDA kernel" in decide(software=software(cuda_ops=("fused_experts",))).reason
    assert "not built" in decide(software=software(cpu_ops=())).reason


def test_the_planned_limits_are_those_of_the_kernel():
    assert (pass_module.MAX_REQUESTS, pass_module.HEAD_SIZES) == (MAX_TOKENS, HEAD_SIZES)
    assert pass_module.MAX_QUERIES_PER_KV_HEAD == MAX_QUERIES_PER_KV_HEAD
