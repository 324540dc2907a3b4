"""Which kernels read gpt-oss's experts, and what the plan says of it."""

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
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.software import SoftwareSpec
from tests.builders import cpu_machine, gpt_oss_20b, gpt_oss_120b, gpus, request, software

ASKED = {"flash_dmoe": (Wish.ON, "a profile")}


def decide(
    model: ModelSpec, hardware: HardwareSpec, *vllm_args: str, installed: SoftwareSpec | None = None, **fields: Any
) -> Decision:
    there = installed or (built() if hardware.gpu is not None else software("cpu"))
    named: dict[str, Any] = {"software": there, "vllm_args": vllm_args, **fields}
    return make_plan(request(model, hardware, **named)).decision("flash_dmoe")


def built() -> SoftwareSpec:
    return software("cuda", cuda_ops=("fused_experts",))


def amx() -> HardwareSpec:
    machine = cpu_machine(gib=256, cores=16)
    assert machine.cpu is not None
    return dataclasses.replace(machine, cpu=dataclasses.replace(machine.cpu, isa=(*machine.cpu.isa, "amx_tile")))


@pytest.mark.parametrize("model", [gpt_oss_20b(), gpt_oss_120b()], ids=lambda model: model.name)
def test_on_a_gpu_vllms_kernels_compute_unless_ours_are_asked_for_and_the_plan_says_why(model):
    left = decide(model, gpus("h100_sxm"))
    assert (left.status, left.applier) == (Status.OFF, Applier.NONE)
    assert "not measured" in left.reason
    assert "--enable-flash-dmoe" in left.reason
    ours = decide(model, gpus("h100_sxm"), wishes=ASKED)
    assert (ours.status, ours.applier, ours.vllm_args) == (Status.ON, Applier.PLUGIN, NO_ARGUMENTS)
    assert "by arithmetic" in ours.reason
    (ranges,) = ours.params_as(FlashDmoeParams).dispatch.values()
    assert ranges[-1].up_to == ANY_NUMBER
    assert all(each.use != STOCK for each in ranges)


def test_a_table_of_the_layer_chooses_among_our_kernels():
    installed = built()
    model, h100 = gpt_oss_20b(), gpus("h100_sxm")
    assert h100.gpu is not None
    shape = LayerShape(hidden_size=2880, intermediate_size=2880, num_experts=32, num_global_experts=32, top_k=4)
    rows = (TokenSpeeds(tokens=1, stock_us=50.0, ours_us={"direct": 60.0, "grouped-mxfp4_weights-n16": 40.0}),)
    table = KernelSpeeds(
        device=h100.gpu.name, weights="mxfp4", shape=shape, kernel_hash=installed.kernels.cuda_sources, vllm="0.26.0",
        driver="", rows=rows, source="a test",
    )  # fmt: skip
    installed = dataclasses.replace(installed, kernel_speeds=SpeedTables(tables=(table,)))
    decision = decide(model, h100, installed=installed, wishes=ASKED)
    assert {each.use for each in decision.params_as(FlashDmoeParams).dispatch["mxfp4"]} == {"grouped-mxfp4_weights-n16"}
    assert decision.evidence == ("a test",)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--moe-backend", "marlin"), "--moe-backend marlin"),
        (("--moe-backend", "triton"), "--moe-backend triton"),
        (("--enable-lora",), "--enable-lora"),
        (("--quantization-config", "{}"), "--quantization-config"),
    ],
)
def test_what_makes_vllm_repack_the_experts_is_refused_with_what_was_found(arguments, found):
    decision = decide(gpt_oss_20b(), gpus("h100_sxm"), *arguments, wishes=ASKED)
    assert decision.status is Status.REFUSED
    assert f"found {found}" in decision.reason


def test_mxfp4_of_another_model_is_vllms():
    other = dataclasses.replace(gpt_oss_20b(), model_type="qwen3_moe")
    assert "gpt-oss's in MXFP4, found mxfp4, 4.25 bits" in decide(other, gpus("h100_sxm")).reason


def test_on_a_processor_without_amx_ours_are_the_only_ones():
    decision = decide(gpt_oss_20b(), cpu_machine(gib=256, cores=16))
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.value == "cpu kernel, mxfp4 weights"
    assert "AMX" in decision.reason


@pytest.mark.parametrize("wishes", [{}, ASKED], ids=["auto", "asked"])
def test_with_amx_too_ours_compute_what_vllms_kernel_may_not_survive(wishes):
    decision = decide(gpt_oss_20b(), amx(), wishes=wishes)
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params_as(FlashDmoeParams).measure == ()


def test_four_bit_leaves_experts_alone_that_are_in_four_bits():
    asked = {"four_bit": (Wish.ON, "flag --enable-four-bit")}
    plan = make_plan(request(gpt_oss_20b(), gpus("h100_sxm"), software=built(), wishes=asked))
    assert plan.decision("four_bit").status is Status.REFUSED
    assert "already (MXFP4)" in plan.decision("four_bit").reason


def test_memory_counts_the_experts_as_they_are_stored():
    plan = make_plan(request(gpt_oss_20b(), gpus("h100_sxm"), software=built(), wishes=ASKED))
    model = gpt_oss_20b()
    assert model.expert_weight_bytes == pytest.approx(model.expert_params * weight_element_bytes(4.25), rel=1e-3)
    assert plan.memory.weight_bytes == model.weight_bytes
