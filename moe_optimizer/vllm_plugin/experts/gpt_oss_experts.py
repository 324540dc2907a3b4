"""Answers what vLLM asks of an experts class for gpt-oss's checkpoints, whatever the device."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_gpt_oss import stored_biases, stored_weights


class GptOssExperts:
    """Experts in MXFP4 as stored, with biases and the clamped activation; stands before the class of a device."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kMxfp4Static and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        # vLLM's name for gate and up rows in turn, with the factors of gpt-oss.
        return activation == MoEActivation.SWIGLUOAI

    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights of vLLM's layer as it holds them now."""
        return stored_weights(layer)

    def stored_biases(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the biases of vLLM's layer as it holds them now."""
        return stored_biases(layer)
