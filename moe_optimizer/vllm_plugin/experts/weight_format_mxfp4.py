"""Converts the experts' weights of a layer to MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.specs.expert_formats import MXFP4
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_quantized import QuantizedWeights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS

if TYPE_CHECKING:
    import torch

FOUR_BIT_PASS = "four_bit"


class Mxfp4Weights(QuantizedWeights):
    """Four-bit codes with a scale byte per 32."""

    name = MXFP4
    passes = (EXPERTS_PASS, FOUR_BIT_PASS)
    pass_name, params, words = FOUR_BIT_PASS, FourBitParams, "four bits change"

    def why_not(self, moe_config: Any) -> str:
        """Return why layers of this vLLM FusedMoEConfig cannot be in this format, or ""."""
        from moe_optimizer.ops.mxfp4 import SCALE_GROUP

        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        if any(size % SCALE_GROUP for size in sizes):
            return f"MXFP4 experts need H and I in multiples of {SCALE_GROUP}, found {sizes[0]} and {sizes[1]}"
        return ""

    def quantized(self, w13: torch.Tensor, w2: torch.Tensor, params: FourBitParams) -> KernelWeights:  # noqa: ARG002
        """Return the weights in MXFP4."""
        from moe_optimizer.ops.mxfp4 import quantize_mxfp4

        (gate_up, gate_up_scale), (down, down_scale) = quantize_mxfp4(w13), quantize_mxfp4(w2)
        return KernelWeights(MXFP4, gate_up, down, w13_scale=gate_up_scale, w2_scale=down_scale)

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's two matrices in float32."""
        from moe_optimizer.ops.mxfp4 import dequantize_mxfp4

        assert weights.w13_scale is not None, weights.format
        assert weights.w2_scale is not None, weights.format
        return (
            dequantize_mxfp4(weights.w13[expert], weights.w13_scale[expert]),
            dequantize_mxfp4(weights.w2[expert], weights.w2_scale[expert]),
        )
