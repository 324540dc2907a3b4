from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from moe_optimizer.costs.weights import weight_parts
from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams, FourBitParams, Fp8Params
from moe_optimizer.specs.kernel_speeds import (
    ANY_NUMBER,
    STOCK,
    KernelSpeeds,
    TokenSpeeds,
    kernel_for,
)
from moe_optimizer.specs.layer_sensitivity import LayerSensitivity, LayerSensitivityFile
from moe_optimizer.specs.software import SoftwareSpec
from tests.builders import (
    QWEN_LAYER,
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    dense_model,
    gpus,
    kernel_speeds,
    made_plan,
    profile_with,
    qwen3_30b_a3b,
    software,
    tiny_moe,
    with_speeds,
)

ON = {"four_bit": (Wish.ON, "flag --enable-four-bit")}
MEASURED = {0: 0.14, 1: 0.3, 2: 0.2, 3: 0.26}
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
        weight_format="mxfp4", excluded_layers=(), max_layer_error=0.25, group=32, stored_expert_bits=4.25
    )
    assert "output changes" in decision.reason


@pytest.mark.parametrize(("group", "bits"), [(32, 4.5), (64, 4.25), (128, 4.125)])
def test_int4_is_converted_with_the_bits_of_its_groups(group: int, bits: float):
    decision = decided(profile=with_section(format="int4", group=group))
    params = decision.params_as(FourBitParams)
    assert (params.weight_format, params.group, params.stored_expert_bits) == ("int4", group, bits)
    assert "BF16 scale" in decision.reason
    assert decision.gain is not None
    assert decision.gain.ratio.value == pytest.approx(16 / bits, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": qwen3_30b_a3b(), "hardware": gpus("h100_sxm", 1)}, "on the CPU only"),
        ({"model": dataclasses.replace(tiny_moe(), moe_intermediate_size=96)}, "multiples of 64"),
        ({"profile": with_section(format="mxfp4", group=64)}, "mxfp4 has a scale per 32"),
        ({"software": software("cpu", cpu_ops=("fused_experts",))}, "int4_experts has no CPU kernel"),
        ({"profile": with_section(activations="fp8")}, "activations fp8"),
    ],
)
def test_what_has_no_int4_kernel_or_no_whole_groups_is_refused(changes: dict[str, Any], why: str):
    decision = decided(**({"profile": with_section(format="int4", group=64)} | changes))
    assert decision.status is Status.REFUSED
    assert why in decision.reason


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


def sensitivity(weights: Any = "mxfp4", *, model: str = "tiny-moe", errors: Any = MEASURED) -> LayerSensitivityFile:
    measured = LayerSensitivity(model=model, weights=weights, tokens=4096, errors=errors)
    return LayerSensitivityFile(path="s.json", measured=measured)


def test_layers_that_were_measured_over_the_budget_stay_and_are_counted_as_such():
    decision = decided(four_bit_sensitivity=sensitivity())
    params = decision.params_as(FourBitParams)
    assert params.excluded_layers == (1, 3)
    assert params.max_layer_error is None  # decided here, not once more while loading
    assert params.stored_expert_bits == pytest.approx((16 + 4.25) / 2)
    assert "memory plan" not in decision.reason
    assert any(each.startswith("s.json") and "0.140 to 0.300" in each for each in decision.evidence)


def test_measured_and_named_layers_stay_together():
    profile = with_section(keep_bf16_layers=["layers.0"], max_layer_error=0.28)
    decision = decided(profile=profile, four_bit_sensitivity=sensitivity())
    assert decision.params_as(FourBitParams).excluded_layers == (0, 1)
    profile = with_section(format="int4", group=64, max_layer_error=None)
    decision = decided(profile=profile, four_bit_sensitivity=sensitivity("int4_g64"))
    assert decision.params_as(FourBitParams).excluded_layers == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (sensitivity(model="other"), "s.json: model: got other"),
        (sensitivity("int4_g32"), "weights: got int4_g32, expected mxfp4"),
        (sensitivity(errors={0: 0.1}), r"layers: got \[0\]"),
    ],
    ids=["model", "format", "layers"],
)
def test_a_measurement_of_something_else_is_an_error(given: LayerSensitivityFile, message: str):
    with pytest.raises(InputError, match=message):
        decided(four_bit_sensitivity=given)


def test_auto_does_not_convert():
    decision = decided(wishes={}, profile=with_section(mode="auto"))
    assert decision.status is Status.OFF
    assert "moe-optimizer quality" in decision.reason


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
    plain, four = (made_plan(tiny_moe(), cpu_machine(), "balanced", wishes=PLAIN_FP8 | wishes) for wishes in ({}, ON))
    assert plain.memory is not None
    assert four.memory is not None
    saved = plain.memory.weight_bytes - four.memory.weight_bytes
    assert saved == pytest.approx(weight_parts(tiny_moe()).experts * (1 - 4.25 / 16), rel=2e-3)


def test_our_kernel_is_on_for_it():
    plan = made_plan(tiny_moe(), cpu_machine(), "balanced", wishes=ON)
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
    plan = made_plan(tiny_moe(), cpu_machine(), profile_with("aggressive", sections), wishes=wishes)
    names = ("fp8", "four_bit", "sparsity_24")
    assert [name for name in names if plan.decision(name).status is Status.ON] == [converted]


MXFP4_TABLE = kernel_speeds(
    TokenSpeeds(tokens=1, stock_us=30.0, ours_us={"direct": 20.0}),
    TokenSpeeds(tokens=64, stock_us=100.0, ours_us={"direct": 160.0, "grouped-mxfp4_weights-n16": 140.0}),
    weights="mxfp4",
)


def on_cuda(*tables: KernelSpeeds) -> SoftwareSpec:
    """Return a vLLM for CUDA, with our kernels built and these measurements of them."""
    return with_speeds(software("cuda", cuda_ops=("fused_experts", "flash_dmoe")), *tables)


def on_a_gpu(*tables: KernelSpeeds, profile: Any = None, pinned: Any = None, **changes: Any) -> Any:
    """Return the plan's decisions for Qwen3-30B-A3B on one H100 whose CUDA kernels are built."""
    installed = on_cuda(*tables)
    ctx = context(
        qwen3_30b_a3b(), gpus("h100_sxm", 1), profile or profile_with("balanced"),
        wishes=ON | changes.pop("wishes", {}), software=installed, pinned=pinned or {}, **changes,
    )  # fmt: skip
    return decided_by(ctx, "parallelism", "fp8", "four_bit", "sparsity_24", "flash_dmoe", "tuned_configs").decided


def test_on_a_gpu_the_plan_has_a_kernel_of_ours_for_every_number_of_tokens():
    decisions = on_a_gpu()
    assert (decisions["four_bit"].status, decisions["four_bit"].applier) == (Status.ON, Applier.PLUGIN)
    experts = decisions["flash_dmoe"]
    params = experts.params_as(FlashDmoeParams)
    assert (experts.status, params.kernel, params.measure) == (Status.ON, "cuda", ())
    assert set(params.dispatch) == {"mxfp4"}
    used = [kernel_for(params.dispatch["mxfp4"], tokens) for tokens in (1, 8, 9, 100_000, ANY_NUMBER)]
    assert used == ["direct", "direct", *3 * ["grouped-mxfp4_weights"]]
    assert experts.vllm_args.value("--moe-backend") == "triton"
    assert decisions["tuned_configs"].status is Status.OFF


@pytest.mark.parametrize(
    ("table", "taken"),
    [
        (MXFP4_TABLE, True),
        (dataclasses.replace(MXFP4_TABLE, vllm="0.31.0"), True),
        (dataclasses.replace(MXFP4_TABLE, kernel_hash="6" * 64), False),
        (dataclasses.replace(MXFP4_TABLE, device="NVIDIA H200"), False),
        (dataclasses.replace(MXFP4_TABLE, shape=dataclasses.replace(QWEN_LAYER, top_k=4)), False),
        (dataclasses.replace(MXFP4_TABLE, weights="bf16"), False),
    ],
    ids=["same", "another vLLM", "other kernels", "another GPU", "another layer", "other weights"],
)
def test_a_table_of_these_kernels_on_this_layer_decides_whatever_it_compares_them_with(table, taken):
    experts = on_a_gpu(table)["flash_dmoe"]
    use = kernel_for(experts.params_as(FlashDmoeParams).dispatch["mxfp4"], 64)
    assert use == ("grouped-mxfp4_weights-n16" if taken else "grouped-mxfp4_weights")
    assert experts.evidence == (("a record",) if taken else ())


ROUNDED = {"four_bit": {"activations": "fp8"}}
ROUNDED_TABLE = kernel_speeds(
    TokenSpeeds(tokens=1, stock_us=30.0, ours_us={"direct": 20.0}),
    TokenSpeeds(tokens=1024, stock_us=100.0, ours_us={"grouped-mxfp4_weights-n64": 50.0, "grouped-mxfp4-n96": 40.0}),
    weights="mxfp4",
)


def used_at(tokens: int, *tables: KernelSpeeds, profile: Any = None) -> str:
    """Return the kernel of experts in four bits at a number of tokens."""
    return kernel_for(
        on_a_gpu(*tables, profile=profile)["flash_dmoe"].params_as(FlashDmoeParams).dispatch["mxfp4"], tokens
    )


def test_activations_are_rounded_only_where_the_profile_asks_for_it_however_fast_that_is():
    assert used_at(1024, ROUNDED_TABLE) == "grouped-mxfp4_weights-n64"
    profile = profile_with("balanced", ROUNDED)
    assert used_at(1024, ROUNDED_TABLE, profile=profile) == "grouped-mxfp4-n96"
    assert "from 2 tokens on activations are rounded" in on_a_gpu(ROUNDED_TABLE, profile=profile)["flash_dmoe"].reason
    assert "rounded" not in on_a_gpu(ROUNDED_TABLE)["flash_dmoe"].reason


def test_where_that_was_not_measured_activations_are_rounded_from_32_tokens_per_expert():
    profile = profile_with("balanced", ROUNDED)
    used = [used_at(tokens, profile=profile) for tokens in (8, 9, 511, 512, ANY_NUMBER)]
    assert used == ["direct", *2 * ["grouped-mxfp4_weights"], *2 * ["grouped-mxfp4"]]
    used = [used_at(tokens, MXFP4_TABLE, profile=profile) for tokens in (1, 511, 512)]
    assert used == ["direct", "grouped-mxfp4_weights-n16", "grouped-mxfp4"]


def test_layers_that_stay_in_bf16_are_ours_where_that_was_measured_to_be_faster():
    bf16 = kernel_speeds(TokenSpeeds(tokens=1, stock_us=40.0, ours_us={"direct": 30.0}))
    bf16 = dataclasses.replace(bf16, vllm="0.32.0")
    kept = profile_with("balanced", {"four_bit": {"keep_bf16_layers": ["layers.0"]}})
    dispatch = on_a_gpu(MXFP4_TABLE, bf16, profile=kept)["flash_dmoe"].params_as(FlashDmoeParams).dispatch
    assert [kernel_for(dispatch["bf16"], tokens) for tokens in (1, 2)] == ["direct", STOCK]
    assert set(on_a_gpu(MXFP4_TABLE, bf16)["flash_dmoe"].params_as(FlashDmoeParams).dispatch) == {"mxfp4"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pinned": {"--enable-lora": ""}}, "--enable-lora"),
        ({"pinned": {"--moe-backend": "cutlass"}}, "--moe-backend cutlass"),
        ({"wishes": {"dual_batch_overlap": (Wish.ON, "flag --enable-dual-batch-overlap")}}, "dual_batch_overlap"),
        ({"dtype": "float16"}, "bfloat16"),
    ],
    ids=["lora", "another backend", "overlap", "dtype"],
)
def test_what_our_kernels_do_not_compute_on_a_gpu_is_not_converted(changes, why):
    decision = on_a_gpu(**changes)["four_bit"]
    assert decision.status is Status.REFUSED
    assert why in decision.reason


FP8_TOO = {"fp8": (Wish.ON, "flag --enable-fp8")}


def test_on_a_gpu_fp8_is_then_for_the_other_matrices():
    alone, both = on_a_gpu(MXFP4_TABLE), on_a_gpu(MXFP4_TABLE, wishes=FP8_TOO)
    assert (both["fp8"].status, both["four_bit"].status) == (Status.ON, Status.ON)
    fp8 = both["fp8"].params_as(Fp8Params)
    assert (fp8.expert_bits, fp8.stored_expert_bits, fp8.linear_bits) == (None, None, 8)
    config = json.loads(both["fp8"].vllm_args.value("--quantization-config") or "")
    assert config["linear"] == "fp8_per_channel"
    assert "moe" not in config
    assert both["fp8"].env == {}
    assert "four_bit" in both["fp8"].rejected["experts"]
    assert both["four_bit"].params == alone["four_bit"].params
    assert both["flash_dmoe"].params == alone["flash_dmoe"].params


def test_the_memory_plan_has_four_bits_for_experts_and_eight_for_other_matrices():
    plans = [
        made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1), "balanced", wishes=wishes, software=on_cuda())
        for wishes in (ON, ON | FP8_TOO)
    ]
    alone, both = (plan.memory for plan in plans)
    model = qwen3_30b_a3b()
    assert alone.weight_bytes - both.weight_bytes == pytest.approx(model.attention_params, rel=0.02)
    # The layouts are predicted from the same weights.
    weights = [plan.layouts.estimate.weight_bytes for plan in plans if plan.layouts is not None]
    assert weights == [pytest.approx(memory.weight_bytes, rel=0.01) for memory in (alone, both)]


@pytest.mark.parametrize(
    "changes",
    [{"pinned": {"--enable-lora": ""}}, {"profile": profile_with("balanced", {"flash_dmoe": {"mode": "off"}})}],
    ids=["lora", "no kernel"],
)
def test_where_four_bits_are_refused_fp8_has_the_experts_too(changes):
    decisions = on_a_gpu(wishes=FP8_TOO, **changes)
    assert decisions["four_bit"].status is Status.REFUSED
    assert decisions["fp8"].params_as(Fp8Params).expert_bits == 8


def test_what_fp8_gains_then_is_beside_experts_in_four_bits():
    gains = [
        on_a_gpu(MXFP4_TABLE, wishes=wishes, profile=profile_with("balanced", {"fp8": {"experts": experts}}))[
            "fp8"
        ].gain
        for wishes, experts in ((FP8_TOO, "auto"), (FP8_TOO | {"four_bit": (Wish.OFF, "flag")}, "off"))
    ]
    beside_four_bits, beside_bf16 = (gain.ratio.value for gain in gains)
    # The same bytes less of a step that is shorter.
    assert beside_four_bits > beside_bf16 > 1


def test_on_the_cpu_the_two_flags_contradict_each_other():
    with pytest.raises(InputError, match="--enable-fp8 and --enable-four-bit contradict"):
        made_plan(tiny_moe(), cpu_machine(), "balanced", wishes=ON | FP8_TOO)
