"""Converts the experts' weights of a layer to FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_quantized import QuantizedWeights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS

if TYPE_CHECKING:
    import torch

FP8_PASS = "fp8"
FORMAT = "fp8"


class Fp8Weights(QuantizedWeights):
    """E4M3 weights with FP32 scales."""

    name = FORMAT
    passes = (EXPERTS_PASS, FP8_PASS)
    pass_name, params, words = FP8_PASS, Fp8Params, "FP8 changes"

    def quantized(self, w13: torch.Tensor, w2: torch.Tensor, params: Fp8Params) -> KernelWeights:
        """Return the weights in FP8, with the share of them that is at its largest number."""
        from moe_optimizer.ops.fp8_quant import quantize_fp8, saturated_share

        gate_up, gate_up_scale = quantize_fp8(w13, granularity=params.granularity)
        down, down_scale = quantize_fp8(w2, granularity=params.granularity)
        share = saturated_share(gate_up, down)
        return KernelWeights(FORMAT, gate_up, down, w13_scale=gate_up_scale, w2_scale=down_scale, saturated=share)

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's two matrices in float32."""
        from moe_optimizer.ops.fp8_quant import dequantize_fp8

        assert weights.w13_scale is not None, weights.format
        assert weights.w2_scale is not None, weights.format
        return (
            dequantize_fp8(weights.w13[expert], weights.w13_scale[expert]),
            dequantize_fp8(weights.w2[expert], weights.w2_scale[expert]),
        )
