"""Products of few tokens with dense weights: where the kernel fits, in BF16 by itself and in FP8 where asked for."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.ops.skinny_gemm import MAX_TOKENS
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.passes.skinny_gemm import skinny_gemm as pass_module
from moe_optimizer.plan.decision import Applier, Decision, Status
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    qwen3_30b_a3b_int4,
    software,
)

BUILT = software(cuda_ops=("fused_experts", "skinny_gemm"))
ASKED = resolve_wishes(["skinny-gemm"], [])
QWEN = qwen3_30b_a3b()


def decide(model=QWEN, hardware=None, passes=None, **changes) -> Decision:
    profile = profile_with(passes={"fp8": {"mode": "off"}} | (passes or {}))
    ctx = context(model, hardware or gpus("h100_sxm", 1), profile, **({"wishes": ASKED, "software": BUILT} | changes))
    before = ("disaggregation", "replicas", "parallelism", "fp8")
    return decided_by(ctx, *before, "skinny_gemm").decided["skinny_gemm"]


def test_asked_for_the_plugin_puts_it_into_the_layers():
    decision = decide()
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.value == f"up to {MAX_TOKENS} tokens"
    assert decision.vllm_args.words == ()


def test_not_asked_for_it_is_on_with_one_gpu_and_dense_weights_in_bf16():
    assert decide(wishes={}).status is Status.ON
    two = decide(hardware=gpus("h100_sxm", 2), wishes={})
    assert (two.status, "several GPUs" in two.reason) == (Status.OFF, True)
    assert decide(hardware=gpus("h100_sxm", 2)).status is Status.ON
    quantised = decide(model=qwen3_30b_a3b_int4(), wishes={})
    assert (quantised.status, "gptq" in quantised.reason) == (Status.OFF, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"pinned": {"--quantization": "fp8"}},
        {"pinned": {"--quantization": "online"}},
        {"passes": {"fp8": {"mode": "on"}}},
        {"model": qwen3_30b_a3b_fp8()},
    ],
    ids=["FP8 argument", "online argument", "FP8 pass", "FP8 checkpoint"],
)
def test_dense_weights_in_fp8_are_multiplied_by_it_only_where_it_is_asked_for(changes):
    asked = decide(**changes)
    assert asked.status is Status.ON
    assert any("fp8_few_clients" in record for record in asked.evidence)
    by_itself = decide(wishes={}, **changes)
    assert (by_itself.status, "FP8" in by_itself.reason) == (Status.OFF, True)


def test_where_fp8_has_the_experts_alone_the_dense_weights_are_in_bf16():
    experts_alone = {"passes": {"fp8": {"mode": "on", "linears": "off"}}}
    decision = decide(wishes={}, **experts_alone)
    assert (decision.status, decision.evidence != ()) == (Status.ON, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": cpu_machine()}, "GPUs only"),
        ({"hardware": gpus("a100_80gb", 1)}, "found 8.0"),
        ({"dtype": "float16"}, "float16"),
        ({"pinned": {"--enable-lora": ""}}, "--enable-lora"),
        ({"pinned": {"--cpu-offload-gb": "8"}}, "--cpu-offload-gb"),
        ({"pinned": {"--offload-backend": "prefetch"}}, "--offload-backend"),
    ],
    ids=["CPU", "Ampere", "FP16", "LoRA", "weights in host memory", "weights fetched ahead"],
)
def test_where_it_cannot_be_the_reason_is_said(changes, reason):
    decision = decide(**changes)
    assert decision.status is Status.REFUSED
    assert reason in decision.reason


def test_where_every_number_of_tokens_has_to_take_one_kernel_it_is_refused():
    installed = dataclasses.replace(BUILT, kernel_environment="VLLM_BATCH_INVARIANT=1")
    assert "VLLM_BATCH_INVARIANT" in decide(software=installed).reason


def test_a_build_without_the_kernel_is_named():
    assert "no CUDA kernel" in decide(software=software(cuda_ops=("fused_experts",))).reason
    assert "not built" in decide(software=software(cpu_ops=())).reason


def test_the_planned_tokens_are_those_of_the_kernel():
    assert pass_module.MAX_TOKENS == MAX_TOKENS
