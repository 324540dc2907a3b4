"""What is said of an FP8 checkpoint's experts, on vLLM's own layers and its own conversions of their weights.

A CPU build without AMX has no kernel for FP8 experts, so no layer is run: it is built as vLLM does for a checkpoint,
and its weights are replaced by what vLLM's functions make of them for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_optimizer.vllm_plugin.worker.fp8_checkpoint import fp8_in_memory
from tests.vllm.expert_layers import EXPERTS, HIDDEN, TOP_K, WIDTH, moe_config


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def experts_of(quant_config: Any) -> Any:
    """Return vLLM's layer of routed experts under a quantisation, before weights are loaded into it."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    config = moe_config(in_dtype=torch.bfloat16)
    experts = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=TOP_K,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=config.moe_parallel_config,
        placement_strategy="linear",
        enable_eplb=False,
    )
    return RoutedExperts("model.layers.0.mlp.experts", torch.bfloat16, config, quant_config, experts)


def fp8_experts() -> Any:
    """Return the layer that vLLM makes for a checkpoint of its method fp8, with weights."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    layer = experts_of(Fp8Config())
    for name in ("w13_weight", "w2_weight"):
        getattr(layer, name).data.copy_(torch.ones(()))
    return layer


def test_the_layer_of_an_fp8_checkpoint_is_in_fp8() -> None:
    assert fp8_in_memory(fp8_experts(), "fp8").found == "float8_e4m3fn"


def test_a_layer_that_vllm_leaves_unquantised_is_not() -> None:
    layer = experts_of(None)
    assert "w13_weight first: bfloat16" in fp8_in_memory(layer, "fp8").why_not
    # Where the checkpoint has layers of both kinds, this is one that it left; nothing else is in FP8 here.
    assert fp8_in_memory(layer, "other").why_not.startswith("linears: no matrix")


def test_experts_that_marlin_has_in_integers_are_told_from_what_its_kernel_is_configured_for() -> None:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a16_moe_quant_config, int4_w4a16_moe_quant_config
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import pack_fp8_to_int32
    from vllm.model_executor.utils import replace_parameter

    layer = fp8_experts()
    for name in ("w13_weight", "w2_weight"):
        # As its preparation does for each expert, before it brings them in the order of its kernel, which needs CUDA.
        packed = [pack_fp8_to_int32(weight, size_k_first=False).T.contiguous() for weight in getattr(layer, name)]
        replace_parameter(layer, name, torch.stack(packed))
    assert layer.w13_weight.dtype == torch.int32
    assert fp8_in_memory(layer, "fp8").why_not.startswith("cannot be shown: ")
    scales = {"w1_scale": layer.w13_weight_scale, "w2_scale": layer.w2_weight_scale}
    layer.quant_method.moe_quant_config = fp8_w8a16_moe_quant_config(**scales)
    assert fp8_in_memory(layer, "fp8").found == "FP8 in int32"
    layer.quant_method.moe_quant_config = int4_w4a16_moe_quant_config(w1_zp=None, w2_zp=None, **scales)
    assert "int4" in fp8_in_memory(layer, "fp8").why_not


def test_weights_that_an_emulation_of_vllms_made_bf16_are_named() -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE

    # A module in the place of vLLM's layer, whose parameters want ranks; what is done to it is vLLM's.
    layer: Any = torch.nn.Module()
    layer.orig_dtype = torch.bfloat16
    for name, rows, columns in (("w13_weight", 2 * WIDTH, HIDDEN), ("w2_weight", HIDDEN, WIDTH)):
        values = torch.ones(EXPERTS, rows, columns).to(torch.float8_e4m3fn)
        scales = torch.full((EXPERTS, rows, columns // 32), 127, dtype=torch.uint8)
        layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        layer.register_parameter(f"{name}_scale", torch.nn.Parameter(scales, requires_grad=False))
    assert fp8_in_memory(layer, "other").found == "float8_e4m3fn"
    method: Any = object.__new__(ModelOptMxFp8FusedMoE)
    layer.quant_method = method
    method._dequant_mxfp8_weights_to_bf16(layer)
    assert fp8_in_memory(layer, "other").why_not.endswith("w13_weight first: bfloat16")
