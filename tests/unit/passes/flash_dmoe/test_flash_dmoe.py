from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal

import pytest

from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams, Fp8Params
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, TokenRange, TokenSpeeds
from moe_optimizer.specs.quantity import Quantity, Source
from moe_optimizer.specs.software import SoftwareSpec
from moe_optimizer.specs.workload import WorkloadSpec
from tests.builders import (
    CPU_HASH,
    OURS,
    QWEN_LAYER,
    context,
    cpu_machine,
    decided_by,
    dense_model,
    gpus,
    kernel_speeds,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    software,
    tiny_moe,
    with_speeds,
)


def decide(model=None, hardware=None, **changes: Any) -> Decision:
    ctx = context(model or tiny_moe(), hardware or cpu_machine(), **changes)
    return decided_by(ctx, "parallelism", "flash_dmoe").decided["flash_dmoe"]


def test_under_data_parallelism_it_is_left_to_vllm_because_the_plugin_would_refuse():
    decision = decide(pinned={"--data-parallel-size": "2"})
    assert decision.status is Status.OFF
    assert "data parallelism" in decision.reason


def test_on_the_cpu_build_our_kernel_is_installed_by_the_plugin_where_it_is_asked_for():
    decision = decide(wishes=OURS)
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    (question,) = decision.params_as(FlashDmoeParams).measure
    assert question.device.endswith(" 3 threads")
    assert decision.params == FlashDmoeParams(kernel="cpu", measure=(question,), cores=(0, 1, 2))
    assert "bf16" in decision.value
    assert not decision.required


def test_no_gain_is_claimed_without_a_record():
    decision = decide(wishes=OURS)
    assert decision.gain is None
    assert "no speed-up" in decision.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_never_measured_is_left_to_vllm(device):
    decision = decide() if device == "cpu" else decide_on_h200()
    assert (decision.status, decision.applier) == (Status.OFF, Applier.NONE)
    assert decision.params_as(FlashDmoeParams).kernel is None
    assert decision.params_as(FlashDmoeParams).measure
    assert "not measured" in decision.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wishes", [{}, {"flash_dmoe": (Wish.AUTO, "profile")}])
def test_what_the_start_will_measure_is_pending_until_then(device, wishes):
    changes = {"will_measure": True, "wishes": wishes}
    decision = decide(**changes) if device == "cpu" else decide_on_h200(**changes)
    assert (decision.status, decision.applier) == (Status.PENDING, Applier.NONE)


def test_an_fp8_plan_is_pending_though_there_is_a_table_of_bf16_weights():
    ctx = context(qwen3_30b_a3b(), gpus("h200", 1), software=measured(speeds()), will_measure=True,
                  wishes={"fp8": (Wish.ON, "flag --enable-fp8")})  # fmt: skip
    decision = decided_by(ctx, "parallelism", "fp8", "flash_dmoe").decided["flash_dmoe"]
    assert decision.status is Status.PENDING
    assert [question.weights for question in decision.params_as(FlashDmoeParams).measure] == ["fp8_block"]


def test_an_unfinished_table_is_used_and_its_question_stays_open():
    decision = decide_on_h200(speeds(unfinished=True), will_measure=True)
    assert decision.status is Status.ON
    (question,) = decision.params_as(FlashDmoeParams).measure
    assert question.weights == "bf16"


def test_an_unfinished_measurement_on_the_cpu_decides_nothing_yet():
    software = measured(dataclasses.replace(cpu_speeds(1.5), unfinished=True), device="cpu")
    assert decide(software=software).status is Status.OFF
    assert decide(software=software, will_measure=True).status is Status.PENDING


def test_a_table_of_a_busy_gpu_is_used_with_a_warning_and_measured_again():
    decision = decide_on_h200(speeds(disturbed="the GPU was 43 % busy with something else"))
    assert decision.status is Status.ON
    assert "43 % busy" in decision.warnings[0]
    assert decision.params_as(FlashDmoeParams).measure


def test_a_server_that_runs_already_has_the_weights_that_vllm_was_told_to_make():
    ctx = context(qwen3_30b_a3b(), gpus("h200", 1), software=measured(), inside_vllm=True,
                  wishes={"fp8": (Wish.ON, "flag --enable-fp8")})  # fmt: skip
    decision = decided_by(ctx, "parallelism", "fp8", "flash_dmoe").decided["flash_dmoe"]
    assert [question.weights for question in decision.params_as(FlashDmoeParams).measure] == ["bf16"]


def test_a_tuned_configuration_is_a_question_of_its_own(tmp_path):
    rows = {"1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}}
    (tmp_path / "E=128,N=768,device_name=NVIDIA_H200.json").write_text(json.dumps(rows))
    with_config = dataclasses.replace(measured(speeds()), tuned_configs=str(tmp_path))
    decision = decide_on_h200(software=with_config)
    (question,) = decision.params_as(FlashDmoeParams).measure
    assert question.environment.startswith("tuned=")
    assert "needed tuned=" in decision.reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"quant_method": "fp8", "weight_bits": 8.0}, "found fp8, 8 bits"),
        ({"expert_matrices": 2}, "(3 matrices), found 2"),
        ({"expert_activation": "gelu"}, "silu, found gelu"),
        ({"expert_has_bias": True}, "without biases"),
        ({"num_experts": 2048}, "1024 experts"),
    ],
)
def test_a_model_it_cannot_compute_is_refused_with_what_is_needed_and_found(change, why):
    decision = decide(dataclasses.replace(tiny_moe(), **change))
    assert decision.status is Status.OFF
    assert why in decision.reason


def test_a_dense_model_has_nothing_for_it():
    assert "no experts" in decide(dense_model(), cpu_machine(gib=64)).reason


def test_not_built_says_why():
    decision = decide(
        software=software("cpu", cpu_ops=()), wishes={"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")}
    )
    assert decision.status is Status.REFUSED
    assert "build.sh" in decision.reason


def test_without_a_cuda_kernel_for_the_architecture_it_is_refused():
    none = software("cuda", cuda_ops=())
    assert decide(qwen3_30b_a3b(), gpus("h100_sxm", 1), software=none).reason.startswith("fused_experts ")
    said = dataclasses.replace(none, kernels=dataclasses.replace(none.kernels, cuda_why_not="no nvcc found"))
    assert decide(qwen3_30b_a3b(), gpus("h100_sxm"), software=said).reason.endswith(": no nvcc found")
    built = software("cuda", cuda_ops=("fused_experts",))
    assert re.search("sm_80, .*sm_90a", decide(qwen3_30b_a3b(), gpus("a100_80gb"), software=built).reason)


WINS_UP_TO_8 = (
    TokenSpeeds(tokens=1, stock_us=30.0, ours_us={"direct": 25.0}),
    TokenSpeeds(tokens=8, stock_us=130.0, ours_us={"direct": 125.0, "grouped-bf16-n16": 140.0}),
    TokenSpeeds(tokens=64, stock_us=300.0, ours_us={"grouped-bf16-n16": 310.0}),
)


def speeds(rows: tuple[TokenSpeeds, ...] = WINS_UP_TO_8, **changes: Any) -> KernelSpeeds:
    return kernel_speeds(*rows, **({"device": "NVIDIA H200"} | changes))


def measured(*tables: KernelSpeeds, device: Literal["cpu", "cuda"] = "cuda") -> SoftwareSpec:
    ops = ("fused_experts",) if device == "cuda" else ()
    return with_speeds(software(device, cuda_ops=ops, version="0.32.0+cu130"), *tables)


def decide_on_h200(*tables: KernelSpeeds, model: Any = None, **changes: Any) -> Decision:
    return decide(model or qwen3_30b_a3b(), gpus("h200", 1), **({"software": measured(*tables)} | changes))


def test_on_gpus_it_is_used_for_the_numbers_of_tokens_at_which_it_was_faster():
    decision = decide_on_h200(speeds())
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params == FlashDmoeParams(kernel="cuda", dispatch={"bf16": (TokenRange(up_to=8, use="direct"),)})
    assert re.search(r"1-8:.* \(1\.04-1\.20x\), above 8: ", decision.reason)
    assert decision.evidence == ("a record",)
    assert list(decision.rejected) == ["above 8 tokens"]
    assert "faster" in decision.rejected["above 8 tokens"]


def test_more_tokens_than_were_measured_are_not_called_slower():
    decision = decide_on_h200(speeds(WINS_UP_TO_8[:2]))
    assert list(decision.rejected) == ["above 8 tokens"]
    assert "faster" not in decision.rejected["above 8 tokens"]


def test_the_gain_is_what_was_measured_nearest_to_the_batch_size():
    few = WorkloadSpec(batch_size=6, input_tokens=1, output_tokens=1, max_model_len=None)
    gain = decide_on_h200(speeds(), workload=few).gain
    assert gain is not None
    assert gain.ratio == Quantity(130.0 / 125.0, "ratio", Source.MEASURED, "a record")
    many = dataclasses.replace(few, batch_size=64)
    assert decide_on_h200(speeds(), workload=many).gain is None


def test_where_vllm_is_never_slower_nothing_is_replaced():
    slower = (TokenSpeeds(tokens=1, stock_us=30.0, ours_us={"direct": 31.0}),)
    decision = decide_on_h200(speeds(slower))
    assert (decision.status, decision.applier) == (Status.OFF, Applier.NONE)
    assert re.search("vLLM.* 1\\.03x.* 1 token", decision.reason)
    on = {"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")}
    assert decide_on_h200(speeds(slower), wishes=on).status is Status.REFUSED


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ((), "for NVIDIA H200"),
        ((speeds(vllm="0.26.0"),), "vLLM 0.26.0, needed 0.32.0"),
        ((speeds(kernel_hash="e" * 64),), "from other sources"),
    ],
)
def test_without_a_table_for_this_machine_it_stays_off_until_it_is_measured(tables, why):
    decision = decide_on_h200(*tables)
    assert decision.status is Status.OFF
    assert why in decision.reason
    assert "--calibrate 0" in decision.reason
    (question,) = decision.params_as(FlashDmoeParams).measure
    assert (question.device, question.weights, question.vllm) == ("NVIDIA H200", "bf16", "0.32.0")


def test_the_layer_is_looked_up_as_one_gpu_holds_it():
    pinned = {"--tensor-parallel-size": "2"}
    decision = decide(qwen3_30b_a3b(), gpus("h200", 2), software=measured(), pinned=pinned)
    (half,) = decision.params_as(FlashDmoeParams).measure
    assert half.shape.intermediate_size == 384
    apart = pinned | {"--enable-expert-parallel": ""}
    decision = decide(qwen3_30b_a3b(), gpus("h200", 2), software=measured(), pinned=apart)
    (question,) = decision.params_as(FlashDmoeParams).measure
    shape = question.shape
    assert (shape.intermediate_size, shape.num_experts, shape.num_global_experts) == (768, 64, 128)


@pytest.mark.parametrize(
    ("pinned", "sizes"),
    [
        ({"--data-parallel-size": "2", "--enable-expert-parallel": "false"}, (384, 128, 128)),
        ({"--data-parallel-size": "2", "--enable-expert-parallel": ""}, (768, 64, 128)),
        ({"--tensor-parallel-size": "2", "--enable-expert-parallel": "", "--enable-eplb": ""}, (768, 64, 128)),
        (
            {
                "--tensor-parallel-size": "2",
                "--enable-expert-parallel": "",
                "--enable-eplb": "",
                "--eplb-config": '{"num_redundant_experts": 8}',
            },
            (768, 68, 136),
        ),
    ],
    ids=["DP", "DP+EP", "EPLB", "EPLB with replicas"],
)
def test_on_several_gpus_it_is_used_as_each_holds_the_experts(pinned, sizes):
    width, experts, numbered = sizes
    shape = dataclasses.replace(QWEN_LAYER, intermediate_size=width, num_experts=experts, num_global_experts=numbered)
    decision = decide(qwen3_30b_a3b(), gpus("h200", 2), software=measured(speeds(shape=shape)), pinned=pinned)
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN), decision.reason


def test_scales_per_expert_are_left_to_vllm_where_its_load_balancer_moves_experts():
    model = dataclasses.replace(qwen3_30b_a3b_fp8(), weight_block=None, fp8_scales="tensor")
    pinned = {"--tensor-parallel-size": "2", "--enable-expert-parallel": "", "--enable-eplb": ""}
    decision = decide(model, gpus("h200", 2), software=measured(), pinned=pinned)
    assert decision.status is Status.OFF
    assert "EPLB" in decision.reason


def test_another_exchange_of_tokens_than_vllms_own_leaves_the_experts_to_it():
    pinned = {"--data-parallel-size": "2", "--enable-expert-parallel": "", "--all2all-backend": "deepep_low_latency"}
    decision = decide(qwen3_30b_a3b(), gpus("h200", 2), software=measured(), pinned=pinned)
    assert "--all2all-backend deepep_low_latency" in decision.reason


def test_an_fp8_checkpoint_is_looked_up_with_its_own_kind_of_scales():
    asked = decide_on_h200(model=qwen3_30b_a3b_fp8()).params_as(FlashDmoeParams).measure
    assert [question.weights for question in asked] == ["fp8_block"]
    for scales in ("channel", "tensor"):
        model = dataclasses.replace(
            qwen3_30b_a3b_fp8(), weight_block=None, fp8_scales=scales, quant_method="compressed-tensors"
        )
        (question,) = decide_on_h200(model=model).params_as(FlashDmoeParams).measure
        assert question.weights == f"fp8_{scales}"
    decision = decide_on_h200(speeds(weights="fp8_block"), model=qwen3_30b_a3b_fp8())
    assert list(decision.params_as(FlashDmoeParams).dispatch) == ["fp8_block"]


def test_weights_that_vllm_converts_are_looked_up_as_converted_and_kept_layers_as_loaded():
    ctx = context(qwen3_30b_a3b(), gpus("h200", 1), software=measured(speeds(), speeds(weights="fp8_block")),
                  wishes={"fp8": (Wish.ON, "flag --enable-fp8")})  # fmt: skip
    decided = decided_by(ctx, "parallelism", "fp8", "flash_dmoe").decided
    assert decided["fp8"].status is Status.ON
    assert list(decided["flash_dmoe"].params_as(FlashDmoeParams).dispatch) == ["fp8_block"]
    fp8 = decided["fp8"]
    some_kept = dataclasses.replace(fp8.params_as(Fp8Params), excluded_layers=(0,))
    ctx = decided_by(ctx, "parallelism").with_decision(dataclasses.replace(fp8, params=some_kept))
    decided = decided_by(ctx, "flash_dmoe").decided
    assert list(decided["flash_dmoe"].params_as(FlashDmoeParams).dispatch) == ["fp8_block", "bf16"]


def test_online_quantisation_by_the_user_is_looked_up():
    (question,) = decide_on_h200(pinned={"--quantization": "fp8_per_block"}).params_as(FlashDmoeParams).measure
    assert question.weights == "fp8_block"
    assert "--quantization awq after" in decide_on_h200(pinned={"--quantization": "awq"}).reason


@pytest.mark.parametrize(
    ("pinned", "why"),
    [
        ({"--moe-backend": "flashinfer_cutlass"}, "--moe-backend flashinfer_cutlass "),
        ({"--enable-lora": ""}, "found --enable-lora after --"),
    ],
)
def test_where_another_kernel_of_vllm_would_be_beside_it_it_stays_off(pinned, why):
    assert why in decide_on_h200(speeds(), pinned=pinned).reason
    assert decide_on_h200(speeds(), pinned={"--moe-backend": "triton"}).status is Status.ON


ATTENTION = {"--enable-lora": "", "--lora-target-modules": "q_proj k_proj v_proj o_proj"}
EXPERTS_TOO = {"--enable-lora": "", "--lora-target-modules": "q_proj experts"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adapters_that_cannot_change_experts_leave_them_to_our_kernels(device):
    def decided(pinned: dict[str, str]) -> Decision:
        return decide(pinned=pinned) if device == "cpu" else decide_on_h200(speeds(), pinned=pinned)

    assert decided(ATTENTION).status is Status.ON
    for pinned, found in (
        ({"--enable-lora": ""}, "--enable-lora"),
        (EXPERTS_TOO, "--lora-target-modules q_proj experts"),
    ):
        decision = decided(pinned)
        assert decision.status is not Status.ON
        assert f"found {found} after --" in decision.reason


def test_float16_is_refused_on_gpus():
    assert "found float16" in decide_on_h200(speeds(), dtype="float16").reason


def cpu_speeds(*ratios: float) -> KernelSpeeds:
    rows = tuple(
        TokenSpeeds(tokens=4**power, stock_us=100.0 * ratio, ours_us={"fused_experts": 100.0})
        for power, ratio in enumerate(ratios)
    )
    shape = LayerShape(hidden_size=128, intermediate_size=128, num_experts=16, num_global_experts=16, top_k=4)
    return speeds(rows, device="Test CPU (avx2), 3 threads", shape=shape, kernel_hash=CPU_HASH, driver="")


def test_on_a_processor_where_vllm_is_faster_somewhere_its_kernel_stays():
    software = measured(cpu_speeds(0.94, 1.5), device="cpu")
    decision = decide(software=software)
    assert decision.status is Status.OFF
    assert re.search("vLLM.* 1\\.06x.* 1 .*ours.* 1\\.50x", decision.reason)
    asked_for = decide(software=software, wishes={"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")})
    assert asked_for.status is Status.ON
    (warning,) = asked_for.warnings
    assert warning.startswith("flash_dmoe (flag --enable-flash-dmoe): ")
    # At 16 tokens alone.
    assert decide(software=measured(cpu_speeds(1.2, 1.3, 0.93, 1.2), device="cpu")).status is Status.OFF


def test_on_a_processor_where_ours_is_never_slower_it_is_used_with_the_measurement():
    decision = decide(software=measured(cpu_speeds(1.0, 1.5), device="cpu"))
    assert decision.status is Status.ON
    assert "1.00 at 1, 1.50 at 4 tokens" in decision.reason
    assert decision.params_as(FlashDmoeParams).measure == ()
    assert decision.params_as(FlashDmoeParams).threads == 3


def test_a_table_of_other_threads_than_a_worker_says_it_has_is_not_used():
    software = measured(cpu_speeds(1.5), device="cpu")
    assert decide(software=software, worker_threads=3).status is Status.ON
    decision = decide(software=software, worker_threads=1)
    assert decision.status is Status.OFF
    assert "1 threads" in decision.reason


def test_experts_apart_on_the_cpu_need_it_whatever_was_measured():
    pinned = {"--tensor-parallel-size": "2", "--enable-expert-parallel": ""}
    assert decide(software=measured(cpu_speeds(0.5), device="cpu"), pinned=pinned).status is Status.ON


def test_quantisation_by_the_users_own_argument_is_seen():
    assert "--quantization fp8 after --" in decide(pinned={"--quantization": "fp8"}).reason


def test_expert_parallelism_on_the_cpu_makes_it_required_even_when_it_is_refused():
    pinned = {"--tensor-parallel-size": "2", "--enable-expert-parallel": ""}
    assert decide(pinned=pinned).required
    biased = dataclasses.replace(tiny_moe(), expert_has_bias=True)
    refused = decide(biased, pinned=pinned)
    assert refused.required
    assert refused.status is Status.OFF


def test_the_memory_plan_counts_the_buffers_of_the_forwards_that_it_computes():
    def activations(*tables: KernelSpeeds) -> int:
        ctx = context(qwen3_30b_a3b(), gpus("h200", 1), software=measured(*tables))
        decided = decided_by(ctx, "parallelism", "flash_dmoe")
        return decided.memory(max_num_batched_tokens=8192, max_num_seqs=1).activation_bytes

    large = TokenSpeeds(tokens=8192, stock_us=1700.0, ours_us={"grouped-bf16-n128": 1200.0})
    without, small, everything = activations(), activations(speeds()), activations(speeds((*WINS_UP_TO_8[:1], large)))
    assert 0 < small - without < 1 << 20
    assert 0.3 < (everything - without) / 2**30 < 0.45
