"""The file that a plan names for a tuned configuration is the one that vLLM's Triton kernel will look for.

No engine starts: vLLM's own functions are asked what becomes of each plan's experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.costs.fp8_blocks import block_of_slice
from moe_optimizer.errors import DoesNotFitError, InputError, UnsupportedError
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.plan.pass_params import ParallelismParams, TunedConfigsParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import PlanRequest, make_plan
from moe_optimizer.specs.model import ModelSpec
from tests.builders import profile_with, software
from tests.vllm.test_serve_args import CONFIGS, MODELS, inspected

DEVICE = "h200"
SPLITS = ((1, False), (2, False), (2, True), (4, False), (8, False), (8, True))
"""GPUs, and whether each holds whole experts."""
CONVERSIONS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"mode": "off"}, ()),
    ({"mode": "on", "granularity": "block"}, ()),
    ({"mode": "on", "granularity": "channel"}, ()),
    ({"mode": "off"}, ("--quantization", "fp8_per_block")),
    ({"mode": "off"}, ("--quantization", "fp8")),
)
"""The profile's section, and arguments of vLLM."""
NO_TRITON = ("gpt_oss",)
"""Models whose experts (in MXFP4) another kernel computes."""
FEWEST = 5
"""Of the plans of the others, so many at least must name a file: some models fit only eight GPUs, and in one way."""


def planned(model: ModelSpec, split: tuple[int, bool], fp8: dict[str, Any], arguments: tuple[str, ...]) -> Plan | None:
    """Return a plan; None where the model does not fit, or does not divide so."""
    size, whole = split
    installed = find_vllm()
    assert installed is not None
    arguments += ("--tensor-parallel-size", str(size))
    if whole:
        arguments += ("--enable-expert-parallel",)
    try:
        return make_plan(
            PlanRequest(
                model=model,
                hardware=load_hardware(DEVICE, size),
                software=software(version=installed.version, location=str(installed.location)),
                profile=profile_with(passes={"fp8": fp8}),
                num_gpus=size,
                trust_remote_code=True,
                vllm_args=ServeArguments(*arguments),
            )
        )
    except (DoesNotFitError, UnsupportedError, InputError):
        return None


def name_in_vllm(plan: Plan) -> str:
    """Return what vLLM's functions make of the experts on the first GPU."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import refine_fp8_moe_block_shape
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    model, parallel = plan.model, plan.decision("parallelism").params_as(ParallelismParams)
    ranks, whole = parallel.tensor_parallel_size * parallel.data_parallel_size, parallel.expert_parallel
    experts = determine_expert_map(ranks, 0, model.num_experts)[0] if whole else model.num_experts
    width = model.moe_intermediate_size // (1 if whole else ranks)
    scheme, dtype, block = expert_scheme(plan), None, None
    if model.quant_method == "fp8":
        dtype = "fp8_w8a8"
        block = list(model.weight_block) if model.weight_block else None
        if block is not None:
            config: Any = SimpleNamespace(
                intermediate_size_per_partition=width, hidden_dim=model.hidden_size, tp_size=1 if whole else ranks
            )
            block = refine_fp8_moe_block_shape(config, block) or block
    elif scheme.startswith("fp8"):
        dtype = "fp8_w8a8"
        if scheme == "fp8_per_block":
            method: Any = object.__new__(Fp8PerBlockOnlineMoEMethod)
            method.weight_block_size = block = [128, 128]
            no_all2all = SimpleNamespace(
                use_deepep_ht_kernels=False, use_deepep_ll_kernels=False, use_deepep_v2_kernels=False,
                use_nixl_ep_kernels=False,
            )  # fmt: skip
            _, width = method.maybe_roundup_sizes(model.hidden_size, width, None, no_all2all)
    return get_config_file_name(experts, width, dtype, block)


def expert_scheme(plan: Plan) -> str:
    """Return what vLLM is told to convert experts to; "" for nothing."""
    scheme = plan.serve_args.value("--quantization") or ""
    if scheme == "online":
        return json.loads(plan.serve_args.value("--quantization-config") or "").get("moe", "")
    return scheme


@pytest.mark.parametrize("name", MODELS)
def test_the_planned_file_is_the_one_vllm_looks_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    model, named = inspected(name, tmp_path), 0
    gpu = load_hardware(DEVICE, 1).gpu
    assert gpu is not None
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: gpu.name)
    for split in SPLITS:
        for fp8, arguments in CONVERSIONS:
            plan = planned(model, split, fp8, arguments)
            if plan is None:
                continue
            decision = plan.decision("tuned_configs")
            if name in NO_TRITON:
                assert "BF16" in decision.reason
                continue
            assert decision.params_as(TunedConfigsParams).file == name_in_vllm(plan), (split, fp8, arguments)
            named += 1
    assert named >= FEWEST or name in NO_TRITON


def test_blocks_of_sliced_checkpoints_are_vllms() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import refine_fp8_moe_block_shape

    for width in (2048, 768, 384, 192, 96, 88, 64, 48, 32):
        for hidden in (2048, 2880, 7168):
            for slices in (1, 2, 8):
                for block in ((128, 128), (64, 128), (128, 64)):
                    config: Any = SimpleNamespace(
                        intermediate_size_per_partition=width, hidden_dim=hidden, tp_size=slices
                    )
                    theirs = refine_fp8_moe_block_shape(config, list(block)) or list(block)
                    assert list(block_of_slice(block, width, hidden, slices)) == theirs, (width, hidden, slices, block)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    f"compressed-tensors {strategy}": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights},
                "input_activations": {
                    "num_bits": 8, "type": "float", "dynamic": True, "symmetric": True, **activations,
                },
            }
        },
    }
    for strategy, activations, weights in (
        ("tensor", {"strategy": "tensor"}, {}),
        ("channel", {"strategy": "token"}, {}),
        ("block", {"strategy": "group", "group_size": 128}, {"block_structure": [128, 128]}),
    )
} | {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": []},
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}},
    },
}  # fmt: skip
"""FP8 checkpoints of the methods that hold it in a form of their own."""


def triton_quant_config(scheme: dict[str, Any]) -> Any:
    """Return what vLLM's method for the experts of such a checkpoint tells its Triton kernel, made by vLLM itself."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as compressed,
    )
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
    from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkW8A8Fp8MoEMethod

    if scheme["quant_method"] == "modelopt":
        method_class = ModelOptFp8Config.from_config(scheme).FusedMoEMethodCls
        method: Any = object.__new__(method_class)
    elif scheme["quant_method"] == "quark":
        method = object.__new__(QuarkW8A8Fp8MoEMethod)
        method.weight_qscheme = method.input_qscheme = scheme["global_quant_config"]["weight"]["qscheme"]
        method.weight_block_size = None  # of its scheme for blocks, which has no name here
    else:
        linear = CompressedTensorsConfig.from_config(scheme).target_scheme_map["Linear"]
        weights, activations = linear["weights"], linear["input_activations"]
        assert CompressedTensorsConfig._is_fp8_w8a8(weights, activations), "vLLM takes another class for it"
        method = object.__new__(compressed.CompressedTensorsW8A8Fp8MoEMethod)
        method.weight_quant, method.input_quant = weights, activations
        method.weight_block_size = weights.block_structure
    method.fp8_backend = Fp8MoeBackend.TRITON
    scale = torch.ones(1)
    layer: Any = SimpleNamespace(
        w13_weight_scale=scale, w2_weight_scale=scale, w13_input_scale=scale, w2_input_scale=scale
    )
    return method.get_fused_moe_quant_config(layer)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_planned_file_of_another_methods_fp8_is_the_one_vllm_looks_for(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name
    from vllm.platforms import current_platform

    config = json.loads((CONFIGS / "qwen3_moe.json").read_text(encoding="utf-8"))
    scheme = CHECKPOINTS[checkpoint]
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}), encoding="utf-8")
    model = ModelInspector().inspect(tmp_path)
    gpu = load_hardware(DEVICE, 1).gpu
    assert gpu is not None
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: gpu.name)
    theirs = triton_quant_config(scheme)
    dtype, block = theirs.config_name(torch.float8_e4m3fn), theirs.block_shape
    for split in ((1, False), (2, False), (2, True)):
        plan = planned(model, split, {"mode": "off"}, ())
        assert plan is not None
        size, whole = split
        experts, width = (64, 768) if whole else (128, 768 // size)
        assert plan.decision("tuned_configs").params_as(TunedConfigsParams).file == get_config_file_name(
            experts, width, dtype, block
        )
