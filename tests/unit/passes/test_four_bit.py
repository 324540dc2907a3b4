from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.costs.weights import weight_parts
from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.planner import make_plan
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    dense_model,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    request,
    software,
    tiny_moe,
)

ON = {"four_bit": (Wish.ON, "flag --enable-four-bit")}
PLAIN_FP8 = {"fp8": (Wish.OFF, "flag --disable-fp8")}


def decided(model=None, hardware=None, profile: Any = None, **changes: Any) -> Decision:
    profile = profile or profile_with("balanced")
    ctx = context(model or tiny_moe(), hardware or cpu_machine(), profile, **({"wishes": ON} | changes))
    return decided_by(ctx, "parallelism", "fp8", "four_bit").decided["four_bit"]


def with_section(**section: Any) -> Any:
    return profile_with("balanced", {"four_bit": section})


def test_asked_for_on_the_cpu_the_plugin_converts():
    decision = decided()
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params == FourBitParams(
        weight_format="mxfp4", excluded_layers=(), max_layer_error=0.25, stored_expert_bits=4.25
    )
    assert "output changes" in decision.reason


def test_a_step_reads_four_and_a_quarter_bits_instead_of_sixteen():
    gain = decided().gain
    assert gain is not None
    assert gain.ratio.value == pytest.approx(16 / 4.25, rel=1e-3)


def test_layers_that_the_profile_keeps_are_counted_at_their_own_size():
    decision = decided(profile=with_section(keep_bf16_layers=["layers.1"], max_layer_error=None))
    params = decision.params_as(FourBitParams)
    assert (params.excluded_layers, params.max_layer_error) == ((1,), None)
    assert params.stored_expert_bits == pytest.approx((16 + 3 * 4.25) / 4)
    assert "memory plan" not in decision.reason


def test_a_layer_that_the_model_does_not_have_is_an_error():
    with pytest.raises(InputError, match=r"got layers\.4, expected at most layers\.3"):
        decided(profile=with_section(keep_bf16_layers=["layers.4"]))


def test_with_every_layer_kept_nothing_is_left_to_do():
    decision = decided(profile=with_section(keep_bf16_layers=[f"layers.{layer}" for layer in range(4)]))
    assert decision.status is Status.REFUSED
    assert "keep_bf16_layers" in decision.reason


def test_auto_does_not_convert():
    decision = decided(wishes={}, profile=with_section(mode="auto"))
    assert decision.status is Status.OFF
    assert "no quality gate" in decision.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": qwen3_30b_a3b(), "hardware": gpus("h100_sxm", 1)}, "no CUDA kernel"),
        ({"model": deepseek_v3(), "hardware": gpus("h100_sxm", 8)}, "found fp8"),
        ({"model": dense_model(), "hardware": gpus("h100_sxm", 1)}, "no experts"),
        ({"model": dataclasses.replace(tiny_moe(), moe_intermediate_size=112)}, "found 128 and 112"),
        ({"pinned": {"--quantization": "fp8"}}, "--quantization fp8 "),
        ({"wishes": ON | {"flash_dmoe": (Wish.OFF, "flag --disable-flash-dmoe")}}, "by flag"),
        ({"wishes": ON | {"fp8": (Wish.ON, "profile x")}}, "by profile x"),
        ({"software": software("cpu", cpu_ops=("sparse_experts",))}, "fused_experts has"),
    ],
    ids=["gpu", "fp8", "dense", "width", "pinned", "no kernel", "fp8 asked", "old build"],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(changes, why):
    decision = decided(**changes)
    assert decision.status is Status.REFUSED
    assert why in decision.reason


def test_the_memory_plan_has_the_converted_experts():
    plain, four = (
        make_plan(request(tiny_moe(), cpu_machine(), "balanced", wishes=PLAIN_FP8 | wishes)) for wishes in ({}, ON)
    )
    assert plain.memory is not None
    assert four.memory is not None
    saved = plain.memory.weight_bytes - four.memory.weight_bytes
    assert saved == pytest.approx(weight_parts(tiny_moe()).experts * (1 - 4.25 / 16), rel=2e-3)


def test_our_kernel_is_on_for_it():
    plan = make_plan(request(tiny_moe(), cpu_machine(), "balanced", wishes=ON))
    kernel = plan.decision("flash_dmoe")
    assert kernel.status is Status.ON
    assert "mxfp4 experts" in kernel.reason


@pytest.mark.parametrize(
    ("sections", "wishes", "converted"),
    [
        ({"fp8": {"mode": "auto"}}, ON, "four_bit"),
        ({"fp8": {"mode": "on"}}, ON, "four_bit"),
        ({"fp8": {"mode": "on"}, "four_bit": {"mode": "on"}}, {}, "fp8"),
        ({"four_bit": {"mode": "on"}}, {"fp8": (Wish.ON, "flag --enable-fp8")}, "fp8"),
        ({"fp8": {"mode": "off"}, "four_bit": {"mode": "on"}, "sparsity_24": {"mode": "on"}}, {}, "four_bit"),
    ],
    ids=["fp8 auto", "flag before profile", "both in the profile", "fp8 by flag", "pruning too"],
)
def test_of_the_formats_exactly_one_is_used(sections, wishes, converted):
    plan = make_plan(request(tiny_moe(), cpu_machine(), profile_with("aggressive", sections), wishes=wishes))
    names = ("fp8", "four_bit", "sparsity_24")
    assert [name for name in names if plan.decision(name).status is Status.ON] == [converted]
