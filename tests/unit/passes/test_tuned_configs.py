from __future__ import annotations

import pytest

from moe_optimizer.plan.decision import Decision, Status
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


def decide(model, hardware, location, **changes) -> Decision:
    ctx = context(model, hardware, software=software(location=str(location)), **changes)
    return decided_by(ctx, "parallelism", "tuned_configs").decided["tuned_configs"]


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
    assert missing.status is Status.UNAVAILABLE
    assert missing.params["missing"][0] == name
    (vllm / SHIPPED / name).touch()
    present = decide(model, hardware, vllm)
    assert present.status is Status.OFF
    assert present.evidence == (name,)


def test_no_machine_path_is_in_the_decision(vllm):
    assert str(vllm) not in repr(decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm))


def test_a_folder_of_the_users_goes_before_vllms_own(vllm, tmp_path):
    name = "E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / name).touch()
    profile = profile_with(passes={"tuned_configs": {"folder": str(folder)}})
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), vllm, profile=profile)
    assert decision.status is Status.ON
    assert decision.env == {"VLLM_TUNED_CONFIG_FOLDER": str(folder)}


@pytest.mark.parametrize(
    ("model", "hardware", "why"),
    [
        (tiny_moe(), cpu_machine(), "Triton configurations are for GPUs"),
        (gpt_oss_120b(), gpus("h100_sxm"), "the Triton kernel is not used for mxfp4 experts"),
    ],
    ids=["cpu", "mxfp4"],
)
def test_where_triton_is_not_used_there_is_nothing_to_find(vllm, model, hardware, why):
    assert decide(model, hardware, vllm).reason == why


def test_a_vllm_that_keeps_its_files_elsewhere_is_said_rather_than_reported_missing(tmp_path):
    decision = decide(qwen3_30b_a3b(), gpus("h100_sxm"), tmp_path)
    assert decision.status is Status.OFF
    assert "does not keep its configurations in" in decision.reason
