"""The experts class for FP8 layers on CUDA: our kernels keep the activations in BF16, vLLM's round them to FP8 too."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from moe_optimizer.ops.reference import SCALE_BLOCK
from moe_optimizer.vllm_plugin.experts.base import QuantKeys
from moe_optimizer.vllm_plugin.experts.canary import weight_changes_are_seen
from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_fp8 import FORMAT
from moe_optimizer.vllm_plugin.session import PluginSession

_BLOCK, _CHANNEL, _TENSOR = "fp8_block", "fp8_channel", "fp8_tensor"
_KINDS = {kFp8Static128BlockSym: _BLOCK, kFp8StaticChannelSym: _CHANNEL, kFp8StaticTensorSym: _TENSOR}
"""Weights -> their name in the plan's dispatch. For our kernels a scale per expert is repeated for each channel."""


class MoeOptimizerFp8CudaExperts(MoeOptimizerCudaExperts):
    """SwiGLU experts with E4M3 weights on a Hopper GPU, for BF16 activations.

    vLLM's own experts expect quantised activations; where they compute a forward, this class quantises for them.
    """

    @classmethod
    def why_not(cls, moe_config: Any, keys: QuantKeys, session: PluginSession) -> str:
        """Return why vLLM computes this layer alone, or ""."""
        parallel = getattr(moe_config, "moe_parallel_config", None)
        if keys[0] == kFp8StaticTensorSym and getattr(parallel, "enable_eplb", False):
            return "its scales per expert are kept in another form, which vLLM's EPLB does not move"
        if keys[0] == kFp8StaticTensorSym and not weight_changes_are_seen():
            return "its scales per expert are kept in another form, and this vLLM does not say when they change"
        return super().why_not(moe_config, keys, session)

    @classmethod
    def weight_kind(cls, moe_config: Any, keys: QuantKeys) -> str:  # noqa: ARG003 - BF16 activations, see `dtypes`
        """Return the name of this layer's weights in the plan's dispatch."""
        return _KINDS[keys[0]]

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:  # noqa: ARG004 - ours stay as they are
        return weight_key in _KINDS

    def stock_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantise the activations as vLLM's prepare step does for its own experts."""
        config = self.quant_config
        return moe_kernel_quantize_input(
            x, config.a1_scale, config.quant_dtype, config.per_act_token_quant, config.block_shape
        )

    def kernel_weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[KernelWeights, str]:
        """Return the layer's weights with a scale per block or per channel, and their name in the plan's dispatch."""
        weights = self._weights(w1, w2, self.w1_scale, self.w2_scale)
        if self.block_shape is not None:
            return weights, _BLOCK
        assert self.w1_scale is not None, "checked with the weights"
        return weights, _TENSOR if self.w1_scale.numel() == w1.shape[0] else _CHANNEL

    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights and scales of vLLM's layer as it holds them now: after an update the configuration of its
        kernel has other tensors with the same values.
        """
        name = getattr(layer.quant_method, "weight_scale_name", "weight_scale")
        scales = (getattr(layer, f"{matrix}_{name}", None) for matrix in ("w13", "w2"))
        return self._weights(layer.w13_weight, layer.w2_weight, *scales)

    def _weights(self, w1: torch.Tensor, w2: torch.Tensor, *scales: torch.Tensor | None) -> KernelWeights:
        w13_scale, w2_scale = (
            _scales(scale, weight, self.block_shape) for scale, weight in zip(scales, (w1, w2), strict=True)
        )
        return KernelWeights(format=FORMAT, w13=w1, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


def _scales(scale: torch.Tensor | None, weight: torch.Tensor, block: list[int] | None) -> torch.Tensor:
    """Return FP32 scales per 128x128 block or per output channel, from the forms in which vLLM keeps them.

    Raises:
        ValueError: another form.
    """
    experts, rows, _ = weight.shape
    if scale is not None and scale.dtype == torch.float32:
        if block is None and scale.numel() == experts:
            return scale.reshape(experts, 1).expand(experts, rows).contiguous()
        if block is None and scale.numel() == experts * rows:
            return scale.reshape(experts, rows).contiguous()
        if block == [SCALE_BLOCK, SCALE_BLOCK] and scale.dim() == 3:
            return scale.contiguous()
    found = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
    raise ValueError(f"scales of the weights: got {found} with block {block}, expected float32 per 128x128 or channel")
