"""Which kernels read the experts of an INT4 checkpoint, and what the plan says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.costs.weights import weight_element_bytes
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.serve_args import NO_ARGUMENTS
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, STOCK, KernelSpeeds, LayerShape, SpeedTables, TokenSpeeds
from moe_optimizer.specs.model import Int4Scheme, ModelSpec
from moe_optimizer.specs.software import SoftwareSpec
from tests.builders import cpu_machine, gpus, profile_with, qwen3_30b_a3b_int4, request, software

ASKED = {"flash_dmoe": (Wish.ON, "a profile")}
SHAPE = LayerShape(hidden_size=2048, intermediate_size=768, num_experts=128, num_global_experts=128, top_k=8)


def decide(
    model: ModelSpec, hardware: HardwareSpec, *vllm_args: str, installed: SoftwareSpec | None = None, **fields: Any
) -> Decision:
    there = installed or (built() if hardware.gpu is not None else software("cpu"))
    named: dict[str, Any] = {"software": there, "vllm_args": vllm_args, **fields}
    return make_plan(request(model, hardware, **named)).decision("flash_dmoe")


def built(*rows: TokenSpeeds) -> SoftwareSpec:
    """With our CUDA kernels and, if there are rows, a table of the layer."""
    there = software("cuda", cuda_ops=("fused_experts",))
    if not rows:
        return there
    gpu = gpus("h100_sxm").gpu
    assert gpu is not None
    table = KernelSpeeds(
        device=gpu.name, weights="int4_g128", shape=SHAPE, kernel_hash=there.kernels.cuda_sources, vllm="0.26.0",
        driver="", rows=rows, source="a test",
    )  # fmt: skip
    return dataclasses.replace(there, kernel_speeds=SpeedTables(tables=(table,)))


def row(tokens: int, marlin: float, ours: float) -> TokenSpeeds:
    return TokenSpeeds(tokens=tokens, stock_us=marlin, ours_us={"direct": ours})


def with_scheme(**changes: Any) -> ModelSpec:
    scheme = Int4Scheme(group=128, zero_points=False, act_order=False)
    return qwen3_30b_a3b_int4(int4=dataclasses.replace(scheme, **changes))


def amx() -> HardwareSpec:
    machine = cpu_machine(gib=256, cores=16)
    assert machine.cpu is not None
    return dataclasses.replace(machine, cpu=dataclasses.replace(machine.cpu, isa=(*machine.cpu.isa, "amx_tile")))


def test_on_a_gpu_vllms_kernels_compute_unless_ours_are_asked_for_and_the_plan_says_why():
    left = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"))
    assert (left.status, left.applier) == (Status.OFF, Applier.NONE)
    assert "Marlin" in left.reason
    assert "not measured" in left.reason
    assert "--enable-flash-dmoe" in left.reason
    ours = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), wishes=ASKED)
    assert (ours.status, ours.applier, ours.vllm_args) == (Status.ON, Applier.PLUGIN, NO_ARGUMENTS)
    assert "by arithmetic" in ours.reason
    (ranges,) = ours.params_as(FlashDmoeParams).dispatch.values()
    assert ranges[-1].up_to == ANY_NUMBER
    assert all(each.use != STOCK for each in ranges)


def test_a_table_in_which_ours_loses_somewhere_leaves_the_layer_to_marlin_with_the_numbers():
    installed = built(row(1, 30.0, 20.0), row(64, 145.0, 177.0))
    left = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), installed=installed)
    assert left.status is Status.OFF
    assert "1.2x faster at 64 tokens" in left.reason
    assert "0.82 to 1.50 times" in left.reason
    assert left.evidence == ("a test",)
    assert decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), installed=installed, wishes=ASKED).status is Status.ON


def test_a_table_in_which_ours_never_loses_takes_ours_unasked_with_the_gain():
    installed = built(row(1, 30.0, 20.0), row(64, 145.0, 144.0))
    ours = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), installed=installed, batch_size=1)
    assert (ours.status, ours.evidence) == (Status.ON, ("a test",))
    assert ours.gain is not None
    assert ours.gain.ratio.value == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--moe-backend", "marlin"), "--moe-backend marlin"),
        (("--quantization", "moe_wna16"), "--quantization moe_wna16"),
        (("--enable-lora",), "--enable-lora"),
    ],
)
def test_what_makes_vllm_load_the_experts_in_another_way_is_refused_with_what_was_found(arguments, found):
    decision = decide(qwen3_30b_a3b_int4(), gpus("h100_sxm"), *arguments, wishes=ASKED)
    assert decision.status is Status.REFUSED
    assert f"found {found}" in decision.reason


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


def test_on_a_processor_without_amx_ours_are_the_only_ones():
    decision = decide(qwen3_30b_a3b_int4(), cpu_machine(gib=256, cores=16))
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.value == "cpu kernel, int4_g128 weights"
    assert "AMX" in decision.reason
    installed = software("cpu", cpu_ops=("fused_experts",))
    assert "int4_experts has no CPU kernel" in decide(qwen3_30b_a3b_int4(), amx(), installed=installed).reason


@pytest.mark.parametrize("wishes", [{}, ASKED], ids=["auto", "asked"])
def test_with_amx_too_ours_compute_what_vllms_kernel_may_not_survive(wishes):
    decision = decide(qwen3_30b_a3b_int4(), amx(), wishes=wishes)
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params_as(FlashDmoeParams).measure == ()


def test_four_bit_leaves_experts_alone_that_are_in_four_bits():
    asked = {"four_bit": (Wish.ON, "flag --enable-four-bit")}
    plan = make_plan(request(qwen3_30b_a3b_int4(), gpus("h100_sxm"), software=built(), wishes=asked))
    assert plan.decision("four_bit").status is Status.REFUSED
    assert "already (INT4)" in plan.decision("four_bit").reason


def test_memory_counts_the_experts_as_they_are_stored():
    model = qwen3_30b_a3b_int4()
    plan = make_plan(request(model, gpus("h100_sxm"), software=built(), wishes=ASKED))
    assert model.expert_weight_bytes == pytest.approx(model.expert_params * weight_element_bytes(4.15625), rel=1e-3)
    assert plan.memory.weight_bytes == model.weight_bytes
