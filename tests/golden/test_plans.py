"""Whole plans, kept so that a change of any decision, estimate or sentence shows in review."""

from __future__ import annotations

import dataclasses
import json

import pytest

from moe_optimizer.passes.registry import PASS_NAMES
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.specs.draft import DraftSpec
from tests.builders import (
    cpu_machine,
    deepseek_v3,
    gpt_oss_20b,
    gpt_oss_120b,
    gpus,
    made_plan,
    mixtral_8x7b,
    placement_load,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    qwen3_30b_a3b_int4,
    software,
    tiny_moe,
    tiny_moe_int4,
)
from tests.golden.stored import PLANS, read_plan, stored_texts

CONFIGS = "model_executor/layers/fused_moe/configs"
# What the pretended vLLM ships: one of the configurations that the cases below look for.
SHIPPED = ("E=128,N=384,device_name=NVIDIA_H200.json",)
# And one that somebody has tuned there.
TUNED = "E=128,N=768,device_name=NVIDIA_H200.json"
TUNED_ROWS = {
    "64": {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 3,
    }
}
PROFILES = {
    "ep-2": {"parallelism": {"tensor_parallel_size": 2, "expert_parallel": "on"}},
    "dp-eplb": {
        "parallelism": {"data_parallel_size": 2, "tensor_parallel_size": 8, "expert_parallel": "on"},
        "expert_placement": {"redundant_experts": 32},
    },
    "offloaded": {"kv_cache": {"dtype": "fp8", "tiering": "on"}, "norm_rope_fusion": {"mode": "on"}},
    "drafting": {"speculation": {"acceptance": 0.6}},
    "drafting-model": {"speculation": {"method": "draft", "acceptance": 0.6}},
    "sparse": {"sparsity_24": {"mode": "on"}},
    "four-bit": {"four_bit": {"mode": "on"}},
    "int4": {"four_bit": {"mode": "on", "format": "int4", "group": 64}},
    "ours": {"flash_dmoe": {"mode": "on"}},
    "skinny": {"skinny_gemm": {"mode": "on"}},
    "skinny-fp8": {"skinny_gemm": {"mode": "on"}, "fp8": {"mode": "on"}},
    "replicas": {"replicas": {"mode": "on"}},
    "disaggregated": {"disaggregation": {"mode": "on"}},
    "split": {"disaggregation": {"mode": "on", "prefill_servers": 1, "decode_servers": 3}},
    "tiered": {"disaggregation": {"mode": "on"}, "kv_cache": {"tiering": "on"}},
    "overlapped": {
        "parallelism": {"data_parallel_size": 2, "expert_parallel": "on"},
        "dual_batch_overlap": {"mode": "on"},
    },
}
"""The balanced profile with settings of passes changed; every other name is that of a shipped profile."""

CASES = {
    "qwen3-30b-a3b_h100_sxm-x1_conservative": (qwen3_30b_a3b, ("h100_sxm", 1), "conservative"),
    "qwen3-30b-a3b_h100_sxm-x1_balanced": (qwen3_30b_a3b, ("h100_sxm", 1), "balanced"),
    "qwen3-30b-a3b_h100_sxm-x1_aggressive": (qwen3_30b_a3b, ("h100_sxm", 1), "aggressive"),
    "qwen3-30b-a3b_h100_sxm-x1_single_h100": (qwen3_30b_a3b, ("h100_sxm", 1), "single_h100"),
    "qwen3-30b-a3b_h100_sxm-x1_throughput": (qwen3_30b_a3b, ("h100_sxm", 1), "throughput"),
    "qwen3-30b-a3b_h100_sxm-x1_four-bit": (qwen3_30b_a3b, ("h100_sxm", 1), "four-bit"),
    "qwen3-30b-a3b_h100_sxm-x1_skinny": (qwen3_30b_a3b, ("h100_sxm", 1), "skinny"),
    "qwen3-30b-a3b_h100_sxm-x1_skinny-fp8": (qwen3_30b_a3b, ("h100_sxm", 1), "skinny-fp8"),
    "qwen3-30b-a3b_h200-x1_balanced": (qwen3_30b_a3b, ("h200", 1), "balanced"),
    "qwen3-30b-a3b_h200-x2_balanced": (qwen3_30b_a3b, ("h200", 2), "balanced"),
    "qwen3-30b-a3b_h200-x2_replicas": (qwen3_30b_a3b, ("h200", 2), "replicas"),
    "qwen3-30b-a3b_h200-x2_disaggregated": (qwen3_30b_a3b, ("h200", 2), "disaggregated"),
    "qwen3-30b-a3b_h200-x4_split": (qwen3_30b_a3b, ("h200", 4), "split"),
    "qwen3-30b-a3b_h200-x4_split_2-machines": (qwen3_30b_a3b, ("h200", 4), "split"),
    "qwen3-30b-a3b_h200-x2_tiered": (qwen3_30b_a3b, ("h200", 2), "tiered"),
    "qwen3-30b-a3b_h100_sxm-x8_balanced": (qwen3_30b_a3b, ("h100_sxm", 8), "balanced"),
    "qwen3-30b-a3b_h100_sxm-x8_aggressive": (qwen3_30b_a3b, ("h100_sxm", 8), "aggressive"),
    "qwen3-30b-a3b-fp8_h100_sxm-x4_balanced": (qwen3_30b_a3b_fp8, ("h100_sxm", 4), "balanced"),
    "qwen3-30b-a3b-int4_h100_sxm-x1_balanced": (qwen3_30b_a3b_int4, ("h100_sxm", 1), "balanced"),
    "qwen3-30b-a3b-int4_h200-x1_ours": (qwen3_30b_a3b_int4, ("h200", 1), "ours"),
    "mixtral-8x7b_h100_sxm-x2_balanced": (mixtral_8x7b, ("h100_sxm", 2), "balanced"),
    "deepseek-v3_h200-x8_balanced": (deepseek_v3, ("h200", 8), "balanced"),
    "deepseek-v3_h200-x8_aggressive": (deepseek_v3, ("h200", 8), "aggressive"),
    "deepseek-v3_h200-x16_placed": (deepseek_v3, ("h200", 16), "dp-eplb"),
    "deepseek-v3_h100_sxm-x8_2-machines": (deepseek_v3, ("h100_sxm", 8), "conservative"),
    "qwen3-30b-a3b_h100_sxm-x8_2-machines": (qwen3_30b_a3b, ("h100_sxm", 8), "conservative"),
    "qwen3-30b-a3b_h100_sxm-x2_offloaded": (qwen3_30b_a3b, ("h100_sxm", 2), "offloaded"),
    "qwen3-30b-a3b_h100_sxm-x8_overlapped": (qwen3_30b_a3b, ("h100_sxm", 8), "overlapped"),
    "qwen3-30b-a3b_h100_sxm-x1_drafting": (qwen3_30b_a3b, ("h100_sxm", 1), "drafting"),
    "qwen3-30b-a3b_h100_sxm-x1_drafting-model": (qwen3_30b_a3b, ("h100_sxm", 1), "drafting-model"),
    "qwen3-30b-a3b_h200-x1_tuned": (qwen3_30b_a3b, ("h200", 1), "balanced"),
    "gpt-oss-20b_h100_sxm-x1_balanced": (gpt_oss_20b, ("h100_sxm", 1), "balanced"),
    "gpt-oss-120b_h100_sxm-x1_balanced": (gpt_oss_120b, ("h100_sxm", 1), "balanced"),
    "gpt-oss-120b_h200-x1_ours": (gpt_oss_120b, ("h200", 1), "ours"),
    "tiny-moe_cpu_conservative": (tiny_moe, None, "conservative"),
    "tiny-moe_cpu_balanced": (tiny_moe, None, "balanced"),
    "tiny-moe_cpu_aggressive": (tiny_moe, None, "aggressive"),
    "tiny-moe_cpu_replicas": (tiny_moe, None, "replicas"),
    "tiny-moe_cpu_disaggregated": (tiny_moe, None, "disaggregated"),
    "tiny-moe_cpu_placed": (tiny_moe, None, "ep-2"),
    "tiny-moe_cpu_sparse": (tiny_moe, None, "sparse"),
    "tiny-moe_cpu_four-bit": (tiny_moe, None, "four-bit"),
    "tiny-moe-int4_cpu_balanced": (tiny_moe_int4, None, "balanced"),
    "tiny-moe_cpu_int4": (tiny_moe, None, "int4"),
}
DRAFT = DraftSpec(
    name="org/small", path="/small", method="draft", vocab_size=151936, num_layers=28, weight_bytes=1_200_000_000,
    kv_bytes_per_token=114_688,
)  # fmt: skip
_BUILT = ("gpt-oss", "qwen3-30b-a3b-int4")
"""Beginnings of cases in which our CUDA kernels are there; they are where four bits are asked for too."""


@pytest.fixture
def plan_for(tmp_path):
    (tmp_path / CONFIGS).mkdir(parents=True)
    for name in SHIPPED:
        (tmp_path / CONFIGS / name).touch()

    def make(case: str) -> Plan:
        model, machine, profile = CASES[case]
        hardware = gpus(*machine) if machine else cpu_machine()
        experts = case.startswith(_BUILT) or profile in ("four-bit", "throughput")
        ours = {"skinny": ("skinny_gemm",), "skinny-fp8": ("skinny_gemm",)}
        built = ours.get(profile, ("fused_experts",) if machine and experts else ())
        installed = software("cuda" if machine else "cpu", location=str(tmp_path), cuda_ops=built)
        if case.endswith("_tuned"):
            (tmp_path / TUNED).write_text(json.dumps(TUNED_ROWS))
            installed = dataclasses.replace(installed, tuned_configs=str(tmp_path))
        load = placement_load(model()) if case.endswith("_placed") else None
        nodes = 2 if case.endswith("_2-machines") else 1
        draft = DRAFT if profile == "drafting-model" else None
        fields = {"software": installed, "expert_load": load, "num_nodes": nodes, "draft": draft}
        changed = profile_with(passes=PROFILES[profile]) if profile in PROFILES else profile
        return made_plan(model(), hardware, changed, **fields)

    return make


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_the_golden_one(case, plan_for, golden, tmp_path):
    model, machine, profile = CASES[case]
    names = {
        "model": model.__name__,
        "hardware": f"{machine[0]}-x{machine[1]}" if machine else "cpu",
        "profile": profile,
    }
    text = plan_for(case).to_json().replace(str(tmp_path), "/folder")
    for path, content in stored_texts(text, case, names).items():
        golden(content, path)


@pytest.mark.parametrize("name", PASS_NAMES)
def test_every_pass_is_on_in_a_golden_plan(name):
    assert any(read_plan(path).decision(name).status is Status.ON for path in PLANS)


def test_no_golden_plan_is_left_over():
    assert sorted(path.stem for path in PLANS) == sorted(CASES)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_golden_plan_can_be_read_back_and_names_no_path_of_a_machine(path):
    text = path.read_text()
    plan, names = read_plan(path), json.loads(text)
    for stored, content in stored_texts(plan.to_json(), path.stem, names).items():
        assert stored.read_text() == content
        assert not any(word in content for word in ("/tmp", "/home", "/work", "site-packages"))
