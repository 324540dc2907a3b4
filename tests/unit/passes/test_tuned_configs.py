from __future__ import annotations

import dataclasses
import json
import re

import pytest

from moe_optimizer.inspection.tuned_configs import state_path
from moe_optimizer.passes.registry import PASS_NAMES
from moe_optimizer.passes.tuned_configs import TunedConfigs
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams, TunedConfigsParams
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.specs.quantity import Source
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    gpt_oss_120b,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    software,
    tiny_moe,
)

SHIPPED = "model_executor/layers/fused_moe/configs"


@pytest.fixture
def vllm(tmp_path):
    (tmp_path / SHIPPED).mkdir(parents=True)
    return tmp_path


def decide(model, hardware, location, folder=None, *, by_variable=False, **changes) -> Decision:
    spec = dataclasses.replace(
        software(location=str(location)), tuned_configs=folder, tuned_configs_by_variable=by_variable
    )
    ctx = context(model, hardware, software=spec, **changes)
    return decided_by(ctx, *PASS_NAMES[: PASS_NAMES.index("tuned_configs") + 1]).decided["tuned_configs"]


@pytest.mark.parametrize(
    ("model", "hardware", "name"),
    [
        (qwen3_30b_a3b(), gpus("h100_sxm", 1), "E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"),
        (qwen3_30b_a3b(), gpus("h100_sxm", 4), "E=128,N=192,device_name=NVIDIA_H100_80GB_HBM3.json"),
        (qwen3_30b_a3b(), gpus("h200", 2), "E=128,N=384,device_name=NVIDIA_H200.json"),
        (
            qwen3_30b_a3b_fp8(),
            gpus("h100_sxm", 4),  # expert parallel, because 768 / 4 is no whole FP8 block
            "E=32,N=768,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            deepseek_v3(),
            gpus("h200", 8),
            "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
    ],
    ids=["tp1", "tp4", "h200", "ep4-fp8", "deepseek"],
)
def test_the_name_is_the_one_vllm_looks_for(vllm, model, hardware, name):
    missing = decide(model, hardware, vllm)
    assert (missing.status, missing.value) == (Status.OFF, "missing")
    assert missing.params_as(TunedConfigsParams).file == name
    assert name in missing.reason
    assert "`moe-optimizer tune`" in missing.reason
    (vllm / SHIPPED / name).touch()
    present = decide(model, hardware, vllm)
    assert (present.status, present.value) == (Status.OFF, "shipped")
    assert present.evidence == (name,)


def test_no_machine_path_is_in_the_decision(vllm):
    assert str(vllm) not in repr(decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm))


NAME = "E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"
ROW = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 4}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tuned").mkdir()
    return tmp_path / "tuned"


def test_a_folder_of_the_users_goes_before_vllms_own(vllm, folder):
    (vllm / SHIPPED / NAME).touch()
    (folder / NAME).write_text(json.dumps({"triton_version": "3.6.0", "1": ROW, "64": ROW}), encoding="utf-8")
    profile = profile_with(passes={"tuned_configs": {"folder": str(folder)}})
    for decision in (
        decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, profile=profile),
        decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder)),
    ):
        assert (decision.status, decision.value) == (Status.ON, "tuned, 2 rows")
        assert decision.env == {"VLLM_TUNED_CONFIG_FOLDER": str(folder)}


def test_the_profiles_folder_goes_before_the_environments(vllm, folder, tmp_path):
    (folder / NAME).write_text(json.dumps({"1": ROW}), encoding="utf-8")
    profile = profile_with(passes={"tuned_configs": {"folder": str(tmp_path / "elsewhere")}})
    missing = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder), profile=profile)
    assert missing.value == "missing"
    assert f"neither in {tmp_path / 'elsewhere'} nor" in missing.reason


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"1": {}}', '{"one": {"BLOCK_SIZE_M": 16}}', '{"1": {"BLOCK_SIZE_M": "16"}}']
)
def test_a_broken_file_is_said_and_not_given_to_vllm(vllm, folder, content):
    (folder / NAME).write_text(content, encoding="utf-8")
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder))
    assert (decision.status, decision.env) == (Status.OFF, {})
    assert NAME in decision.warnings[0]


NO_FOLDER = {"VLLM_TUNED_CONFIG_FOLDER": ""}
OFF = {"tuned_configs": (Wish.OFF, "flag --disable-tuned-configs")}


def test_a_broken_file_in_the_folder_that_vllms_variable_names_is_kept_from_vllm(vllm, folder):
    (folder / NAME).write_text("[]", encoding="utf-8")
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder), by_variable=True)
    assert (decision.status, decision.applier, decision.env) == (Status.OFF, Applier.FLAGS, NO_FOLDER)


def test_switched_off_the_folder_that_vllms_variable_names_is_not_read(vllm, folder):
    (folder / NAME).write_text(json.dumps({"1": ROW}), encoding="utf-8")
    given = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder), by_variable=True, wishes=OFF)
    assert (given.status, given.env) == (Status.OFF, NO_FOLDER)
    (warning,) = given.warnings
    assert warning.startswith("tuned_configs: VLLM_TUNED_CONFIG_FOLDER ")
    cached = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder), wishes=OFF)
    assert (cached.status, cached.env, cached.warnings) == (Status.OFF, {}, ())


def test_vllm_looks_where_the_profile_says_and_nowhere_else(vllm, folder, tmp_path):
    (folder / NAME).write_text(json.dumps({"1": ROW}), encoding="utf-8")
    profile = profile_with(passes={"tuned_configs": {"folder": str(tmp_path / "elsewhere")}})
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, str(folder), by_variable=True, profile=profile)
    assert (decision.value, decision.env) == ("missing", NO_FOLDER)


def test_the_users_variable_stays_where_no_name_is_known(vllm, folder):
    decision = decide(gpt_oss_120b(), gpus("h100_sxm"), vllm, folder=str(folder), by_variable=True)
    assert (decision.status, decision.env, decision.warnings) == (Status.OFF, {}, ())


def tuned(folder, verdicts) -> None:
    """A configuration with what a tuning leaves beside it: (tokens, ratio, whether it won)."""
    (folder / NAME).write_text(json.dumps({"1": ROW}), encoding="utf-8")
    state = {
        "identity": {"vllm": "0.26.0"},
        "verdicts": {
            str(tokens): {
                "tokens": tokens,
                "stock": ROW,
                "row": ROW,
                "stock_us": 2.0,
                "row_us": 1.0,
                "ratio": ratio,
                "low": tokens,
                "high": tokens if won else tokens - 1,
            }
            for tokens, ratio, won in verdicts
        },
    }
    state_path(folder / NAME).write_text(json.dumps(state), encoding="utf-8")


def test_the_gain_is_what_the_tuning_measured_at_the_size_nearest_to_the_batch(vllm, folder):
    tuned(folder, [(8, 1.2, True), (32, 1.09, True), (64, 1.01, False), (4096, 1.5, True)])
    profile = profile_with(workload={"batch_size": 64, "input_tokens": 1024, "output_tokens": 512})
    gain = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder), profile=profile).gain
    assert gain is not None
    assert gain.metric.endswith(" 32 tokens")
    assert (gain.ratio.value, gain.ratio.source) == (1.09, Source.MEASURED)
    assert re.search(r"vLLM 0\.26\.0: " + NAME.removesuffix(".json") + ".tuning.json$", gain.ratio.ref)


def test_where_our_kernels_compute_a_tuning_gains_nothing(vllm, folder):
    tuned(folder, [(32, 1.2, True), (64, 1.1, True), (4096, 1.05, True)])
    spec = dataclasses.replace(software(location=str(vllm)), tuned_configs=str(folder))
    ctx = decided_by(
        context(qwen3_30b_a3b(), gpus("h100_sxm"), software=spec), *PASS_NAMES[: PASS_NAMES.index("tuned_configs")]
    )

    def gain(*ranges: tuple[int, str]):
        dispatch = {"bf16": tuple(TokenRange(up_to=up_to, use=use) for up_to, use in ranges)}
        params = FlashDmoeParams(kernel="cuda", dispatch=dispatch)
        ours = dataclasses.replace(ctx.decided["flash_dmoe"], params=params)
        return TunedConfigs().decide(dataclasses.replace(ctx, decided={**ctx.decided, "flash_dmoe": ours})).gain

    large = gain((256, "direct"))
    assert large is not None
    assert large.metric.endswith(" 4096 tokens")
    between = gain((32, "direct"), (64, "stock"), (256, "direct"))
    assert between is not None
    assert between.metric.endswith(" 64 tokens")
    assert gain((8192, "grouped")) is None


def test_of_a_file_that_no_tuning_made_no_gain_is_claimed(vllm, folder):
    (folder / NAME).write_text(json.dumps({"1": ROW}), encoding="utf-8")
    assert decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder)).gain is None


def test_a_tuning_that_cannot_be_read_is_said_and_no_gain_is_claimed(vllm, folder):
    tuned(folder, [])
    state_path(folder / NAME).write_text("[]", encoding="utf-8")
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, folder=str(folder))
    assert (decision.status, decision.gain) == (Status.ON, None)
    assert re.match("tuned_configs:.* known: E=128", decision.warnings[0])


def test_a_configuration_that_is_asked_for_by_name_and_missing_is_refused(vllm):
    profile = profile_with(passes={"tuned_configs": {"mode": "on"}})
    assert decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, profile=profile).status is Status.REFUSED


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"dtype": "float32"}, "HBM3,dtype=float32.json"),
        ({"pinned": {"--quantization": "fp8"}}, "HBM3,dtype=fp8_w8a8.json"),
        ({"pinned": {"--quantization": "fp8_per_block"}}, "HBM3,dtype=fp8_w8a8,block_shape=[128,128].json"),
        (
            {"profile": profile_with(passes={"fp8": {"mode": "on"}})},
            "HBM3,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            {"profile": profile_with(passes={"fp8": {"mode": "on", "granularity": "channel"}})},
            "HBM3,dtype=fp8_w8a8.json",
        ),
    ],
    ids=["float32", "per tensor", "per block", "converted in blocks", "converted in channels"],
)
def test_the_name_says_what_the_experts_are_computed_in(vllm, changes, ending):
    profile = {"profile": profile_with(passes={"fp8": {"mode": "off"}})}
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, **(profile | changes))
    assert decision.params_as(TunedConfigsParams).file.endswith(ending)


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "quark"])
@pytest.mark.parametrize(("block", "ending"), [(None, "fp8_w8a8"), ((128, 128), "fp8_w8a8,block_shape=[128,128]")])
def test_fp8_experts_have_a_name_whatever_methods_files_hold_them(vllm, method, block, ending):
    model = qwen3_30b_a3b(quant_method=method, weight_bits=8.0, weight_block=block, expert_format="fp8")
    decision = decide(model, gpus("h100_sxm"), vllm)
    assert (
        decision.params_as(TunedConfigsParams).file
        == f"E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3,dtype={ending}.json"
    )


def test_experts_that_a_quantised_checkpoint_leaves_as_they_are_have_their_dtypes_name(vllm):
    model = qwen3_30b_a3b(quant_method="modelopt", weight_bits=4.0, expert_format="dtype")
    assert decide(model, gpus("h100_sxm"), vllm).params_as(TunedConfigsParams).file == NAME


def test_experts_of_fewer_bits_in_an_fp8_checkpoint_have_no_name(vllm):
    model = qwen3_30b_a3b(quant_method="fp8", weight_bits=4.0, weight_block=(128, 128), expert_format="other")
    assert decide(model, gpus("h100_sxm"), vllm).reason.endswith("found fp8, 4 bits")


@pytest.mark.parametrize(
    ("granularity", "name"),
    [
        ("block", "E=128,N=256,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128].json"),
        ("channel", "E=128,N=192,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json"),
    ],
)
def test_vllm_fills_converted_experts_up_to_whole_blocks(vllm, granularity, name):
    profile = profile_with(passes={"fp8": {"mode": "on", "granularity": granularity}})
    assert (
        decide(qwen3_30b_a3b(), gpus("h100_sxm", 4), vllm, profile=profile).params_as(TunedConfigsParams).file == name
    )


def test_where_experts_do_not_divide_the_first_gpus_have_one_more(vllm):
    model = qwen3_30b_a3b(num_experts=126)
    pinned = {"--enable-expert-parallel": ""}
    assert (
        decide(model, gpus("h200", 4), vllm, pinned=pinned).params_as(TunedConfigsParams).file.startswith("E=32,N=768,")
    )


@pytest.mark.parametrize(
    ("model", "hardware", "why"),
    [
        (tiny_moe(), cpu_machine(), "for GPUs"),
        (
            gpt_oss_120b(),
            gpus("h100_sxm"),
            "found mxfp4, 4.25 bits",
        ),
    ],
    ids=["cpu", "mxfp4"],
)
def test_where_triton_is_not_used_there_is_nothing_to_find(vllm, model, hardware, why):
    assert decide(model, hardware, vllm).reason.endswith(why)


def test_a_vllm_that_keeps_its_files_elsewhere_is_said_rather_than_reported_missing(tmp_path):
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), tmp_path)
    assert decision.status is Status.OFF
    assert "not keep its" in decision.reason
