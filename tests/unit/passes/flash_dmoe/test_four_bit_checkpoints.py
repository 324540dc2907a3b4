"""Which kernels read the experts of a checkpoint in INT4 or of gpt-oss, and what the plan says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.costs.weights import weight_element_bytes
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.serve_args import NO_ARGUMENTS
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, STOCK, LayerShape, TokenSpeeds
from moe_optimizer.specs.model import Int4Scheme, ModelSpec
from moe_optimizer.specs.software import SoftwareSpec
from tests.builders import (
    cpu_machine,
    gpt_oss_20b,
    gpt_oss_120b,
    gpus,
    kernel_speeds,
    made_plan,
    profile_with,
    qwen3_30b_a3b_int4,
    software,
    with_speeds,
)

AMX = cpu_machine(gib=256, cores=16, isa=("avx2", "amx_tile"))
ASKED = {"flash_dmoe": (Wish.ON, "a profile")}


stored = pytest.mark.parametrize(
    "model", [gpt_oss_20b(), gpt_oss_120b(), qwen3_30b_a3b_int4()], ids=lambda model: model.name
)


def decide(
    model: ModelSpec, hardware: HardwareSpec, *vllm_args: str, installed: SoftwareSpec | None = None, **fields: Any
) -> Decision:
    there = installed or (built() if hardware.gpu is not None else software("cpu"))
    named: dict[str, Any] = {"software": there, "vllm_args": vllm_args, **fields}
    return made_plan(model, hardware, **named).decision("flash_dmoe")


def built(*rows: TokenSpeeds) -> SoftwareSpec:
    """With our CUDA kernels and, if there are rows, a table of the layer."""
    there = software("cuda", cuda_ops=("fused_experts",))
    return with_speeds(there, kernel_speeds(*rows, weights="int4_g128")) if rows else there


def row(tokens: int, marlin: float, ours: float) -> TokenSpeeds:
    return TokenSpeeds(tokens=tokens, stock_us=marlin, ours_us={"direct": ours})


def with_scheme(**changes: Any) -> ModelSpec:
    scheme = Int4Scheme(group=128, zero_points=False, act_order=False)
    return qwen3_30b_a3b_int4(int4=dataclasses.replace(scheme, **changes))


@stored
def test_on_a_gpu_vllms_kernels_compute_unless_ours_are_asked_for_and_the_plan_says_why(model):
    left = decide(model, gpus("h100_sxm"))
    assert (left.status, left.applier) == (Status.OFF, Applier.NONE)
    assert ("Marlin" if model.int4 else "triton_kernels") in left.reason
    assert "not measured" in left.reason
    assert "--enable-flash-dmoe" in left.reason
    ours = decide(model, gpus("h100_sxm"), wishes=ASKED)
    assert (ours.status, ours.applier, ours.vllm_args) == (Status.ON, Applier.PLUGIN, NO_ARGUMENTS)
    assert "by arithmetic" in ours.reason
    (ranges,) = ours.params_as(FlashDmoeParams).dispatch.values()
    assert ranges[-1].up_to == ANY_NUMBER
    assert all(each.use != STOCK for each in ranges)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (gpt_oss_20b(), ("--moe-backend", "marlin")),
        (gpt_oss_20b(), ("--moe-backend", "triton")),
        (gpt_oss_20b(), ("--enable-lora",)),
        (gpt_oss_20b(), ("--quantization-config", "{}")),
        (qwen3_30b_a3b_int4(), ("--moe-backend", "marlin")),
        (qwen3_30b_a3b_int4(), ("--quantization", "moe_wna16")),
        (qwen3_30b_a3b_int4(), ("--enable-lora",)),
    ],
)
def test_what_makes_vllm_load_the_experts_in_another_way_is_refused_with_what_was_found(model, arguments):
    decision = decide(model, gpus("h100_sxm"), *arguments, wishes=ASKED)
    assert decision.status is Status.REFUSED
    found = arguments[0] if arguments[1:] == ("{}",) else " ".join(arguments)
    assert f"found {found}" in decision.reason


@pytest.mark.parametrize(
    ("model", "weights"), [(gpt_oss_20b(), "mxfp4"), (qwen3_30b_a3b_int4(), "int4_g128")], ids=["gpt-oss", "int4"]
)
def test_on_a_processor_without_amx_ours_are_the_only_ones(model, weights):
    decision = decide(model, cpu_machine(gib=256, cores=16))
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.value == f"cpu kernel, {weights} weights"
    assert "AMX" in decision.reason


def test_a_build_without_the_int4_kernel_says_so():
    installed = software("cpu", cpu_ops=("fused_experts",))
    assert "int4_experts has no CPU kernel" in decide(qwen3_30b_a3b_int4(), AMX, installed=installed).reason


@stored
@pytest.mark.parametrize("wishes", [{}, ASKED], ids=["auto", "asked"])
def test_with_amx_too_ours_compute_what_vllms_kernel_may_not_survive(model, wishes):
    decision = decide(model, AMX, wishes=wishes)
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params_as(FlashDmoeParams).measure == ()


@stored
def test_four_bit_leaves_experts_alone_that_are_in_four_bits(model):
    asked = {"four_bit": (Wish.ON, "flag --enable-four-bit")}
    decision = made_plan(model, gpus("h100_sxm"), software=built(), wishes=asked).decision("four_bit")
    assert decision.status is Status.REFUSED
    assert f"already ({'MXFP4' if model.int4 is None else 'INT4'})" in decision.reason


@stored
def test_memory_counts_the_experts_as_they_are_stored(model):
    plan = made_plan(model, gpus("h100_sxm"), software=built())
    bits = 4.25 if model.int4 is None else 4.15625
    assert model.expert_weight_bytes == pytest.approx(model.expert_params * weight_element_bytes(bits), rel=1e-3)
    assert plan.memory.weight_bytes == model.weight_bytes


def test_a_table_of_the_layer_chooses_among_our_kernels():
    shape = LayerShape(hidden_size=2880, intermediate_size=2880, num_experts=32, num_global_experts=32, top_k=4)
    row = TokenSpeeds(tokens=1, stock_us=50.0, ours_us={"direct": 60.0, "grouped-mxfp4_weights-n16": 40.0})
    installed = with_speeds(built(), kernel_speeds(row, weights="mxfp4", shape=shape))
    decision = decide(gpt_oss_20b(), gpus("h100_sxm"), installed=installed, wishes=ASKED)
    assert {each.use for each in decision.params_as(FlashDmoeParams).dispatch["mxfp4"]} == {"grouped-mxfp4_weights-n16"}
    assert decision.evidence == ("a record",)


def gpt_oss_layer(*rows: TokenSpeeds) -> SoftwareSpec:
    """With our CUDA kernels and a table of gpt-oss-20b's layer."""
    shape = LayerShape(hidden_size=2880, intermediate_size=2880, num_experts=32, num_global_experts=32, top_k=4)
    return with_speeds(built(), kernel_speeds(*rows, weights="mxfp4", shape=shape))


def test_gpt_oss_takes_ours_unasked_where_they_never_lose_to_what_vllm_gives_it_to():
    decision = decide(
        gpt_oss_20b(), gpus("h100_sxm"), installed=gpt_oss_layer(row(1, 60.0, 40.0), row(64, 99.0, 100.0))
    )
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.evidence == ("a record",)


def test_gpt_oss_is_left_to_vllm_where_ours_lose_somewhere_with_the_numbers():
    installed = gpt_oss_layer(row(1, 60.0, 40.0), row(64, 80.0, 100.0))
    left = decide(gpt_oss_20b(), gpus("h100_sxm"), installed=installed)
    assert left.status is Status.OFF
    assert "0.80 to 1.50 times as fast as vLLM's triton_kernels" in left.reason
    assert decide(gpt_oss_20b(), gpus("h100_sxm"), installed=installed, wishes=ASKED).status is Status.ON


def test_activations_are_not_rounded_for_less_than_medians_differ_from_run_to_run():
    both = {"grouped-mxfp4_weights-n16": 57.7, "grouped-mxfp4-n64": 57.6}
    installed = gpt_oss_layer(TokenSpeeds(tokens=4, stock_us=68.0, ours_us=both))
    profile = profile_with("balanced", {"four_bit": {"activations": "fp8"}})
    params = decide(gpt_oss_20b(), gpus("h100_sxm"), installed=installed, profile=profile).params_as(FlashDmoeParams)
    assert params.dispatch["mxfp4"][0].use == "grouped-mxfp4_weights-n16"


def test_a_table_beside_another_vllm_decides_nothing_unasked():
    """What its kernels take of the same weights is not known."""
    shape = LayerShape(hidden_size=2880, intermediate_size=2880, num_experts=32, num_global_experts=32, top_k=4)
    table = dataclasses.replace(kernel_speeds(row(1, 60.0, 40.0), weights="mxfp4", shape=shape), vllm="0.1.0")
    left = decide(gpt_oss_20b(), gpus("h100_sxm"), installed=with_speeds(built(), table))
    assert left.status is Status.OFF
    assert "0.1.0" in left.reason
    assert left.evidence == ("a record",)


@pytest.mark.parametrize(("activations", "gain"), [("bf16", 1.5), ("fp8", 2.0)])
def test_a_kernel_that_rounds_activations_counts_only_where_the_profile_has_it_round(activations, gain):
    rounds = TokenSpeeds(
        tokens=2048, stock_us=600.0, ours_us={"grouped-mxfp4_weights-n128": 400.0, "grouped-mxfp4-n128": 300.0}
    )
    profile = profile_with("balanced", {"four_bit": {"activations": activations}})
    ours = decide(gpt_oss_20b(), gpus("h100_sxm"), installed=gpt_oss_layer(rounds), batch_size=2048, profile=profile)
    assert ours.gain is not None
    assert ours.gain.ratio.value == pytest.approx(gain)


def test_mxfp4_of_another_model_is_vllms():
    other = dataclasses.replace(gpt_oss_20b(), model_type="qwen3_moe")
    assert "gpt-oss's in MXFP4, found mxfp4, 4.25 bits" in decide(other, gpus("h100_sxm")).reason


def test_a_table_in_which_ours_loses_somewhere_leaves_the_layer_to_marlin_with_the_numbers():
    installed = built(row(1, 30.0, 20.0), row(64, 145.0, 177.0))
    left = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), installed=installed)
    assert left.status is Status.OFF
    assert "1.2x faster at 64 tokens" in left.reason
    assert "0.82 to 1.50 times" in left.reason
    assert left.evidence == ("a record",)
    assert decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), installed=installed, wishes=ASKED).status is Status.ON


def test_a_table_in_which_ours_never_loses_takes_ours_unasked_with_the_gain():
    installed = built(row(1, 30.0, 20.0), row(64, 145.0, 144.0))
    ours = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), installed=installed, batch_size=1)
    assert (ours.status, ours.evidence) == (Status.ON, ("a record",))
    assert ours.gain is not None
    assert ours.gain.ratio.value == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (with_scheme(act_order=True), "act-order"),
        (with_scheme(group=-1), "of whole rows"),
        (with_scheme(group=16), "found 16"),
        (with_scheme(zero_points=True), "symmetric GPTQ"),
        (qwen3_30b_a3b_int4(expert_hidden_size=2048 + 64), "multiples of 128, found 2112"),
        (qwen3_30b_a3b_int4(moe_intermediate_size=704), "found 2048 and 704"),
        (qwen3_30b_a3b_int4(expert_format="other", int4=None), "INT4 ones of GPTQ, AWQ or compressed-tensors"),
    ],
    ids=["act-order", "rows", "group", "zero points", "moe_wna16", "width", "another format"],
)
@pytest.mark.parametrize("machine", [gpus("h100_sxm"), cpu_machine(gib=256, cores=16)], ids=["gpu", "cpu"])
def test_what_the_kernels_or_vllms_method_do_not_read_is_refused_with_the_reason(machine, model, said):
    decision = decide(model, machine, wishes=ASKED)
    assert decision.status is Status.REFUSED
    assert said in decision.reason
    # Nothing else reads them there, and the plan says so before the server fails.
    alone = machine.gpu is None and model.int4 is not None
    assert ("does not start on INT4 experts without AMX" in decision.reason) is alone


def test_activations_in_fp32_are_refused():
    decision = decide(qwen3_30b_a3b_int4(), cpu_machine(gib=256, cores=16), wishes=ASKED, dtype="float32")
    assert decision.status is Status.REFUSED
    assert "bfloat16 or float16" in decision.reason


def test_tensor_parallelism_that_would_cut_a_group_is_refused():
    profile = profile_with(passes={"parallelism": {"tensor_parallel_size": 4}})
    decision = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm", 4), profile=profile, wishes=ASKED)
    assert decision.status is Status.REFUSED
    assert "found 2048 and 192" in decision.reason


@stored
def test_memory_counts_what_fills_up_the_rows_of_gpt_oss_that_our_kernels_read(model):
    held = made_plan(model, gpus("h100_sxm"), software=built(), wishes=ASKED).memory.weight_bytes
    # 3 x 2880 rows of 1440 bytes of each expert, each on 1536.
    filling = 3 * 2880 * (1536 - 1440) if model.int4 is None else 0
    assert held - model.weight_bytes == model.num_moe_layers * model.num_experts * filling
