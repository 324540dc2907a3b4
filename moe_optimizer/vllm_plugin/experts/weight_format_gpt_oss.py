"""Defines how gpt-oss's checkpoints hold their experts: in MXFP4 already, which our kernels read as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_mxfp4 import Mxfp4Weights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS

if TYPE_CHECKING:
    import torch

FORMAT = "gpt_oss"


class GptOssWeights(Mxfp4Weights):
    """MXFP4 as stored: gate and up rows in turn, a bias for each matrix, the clamped activation."""

    name = FORMAT
    passes = (EXPERTS_PASS,)
    activation = "swigluoai"


def stored_weights(layer: Any) -> KernelWeights:
    """Return the weights of vLLM's layer, which are its parameters under the checkpoint's values."""
    return KernelWeights(
        format=FORMAT,
        w13=layer.w13_weight,
        w2=layer.w2_weight,
        w13_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
    )


def stored_biases(layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the biases [E, 2I] and [E, H] of vLLM's layer."""
    return getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
