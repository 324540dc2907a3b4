"""Answers what vLLM asks of an experts class for gpt-oss's checkpoints, whatever the device."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static


class GptOssExperts:
    """Experts in MXFP4 as stored, with biases and the clamped activation; stands before the class of a device."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kMxfp4Static and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        # vLLM's name for gate and up rows in turn, with the factors of gpt-oss.
        return activation == MoEActivation.SWIGLUOAI
