"""Reads the dense layers that vLLM holds in FP8: where weight and scales lie, and how vLLM multiplies with them.

vLLM rounds a layer's input to E4M3 and multiplies E4M3 with E4M3. What does that is an object of the layer's
quantisation method or scheme, which takes weight and scales from the layer by name:

    scales       weight               scales                               kernel
    tensor       [K, N], the view     weight_scale, one number             FP8ScaledMMLinearKernel (CUTLASS on Hopper)
    channel      of a contiguous      weight_scale [N, 1]                  the same
    block        [N, K]; or that      weight_scale_inv or weight_scale     Fp8BlockScaledMMLinearKernel (FlashInfer and
                 itself               [ceil(N / 128), ceil(K / 128)]       DeepGEMM, or CUTLASS, on Hopper)

On Hopper no kernel packs the scales of blocks: they stay FP32, rounded to powers of two or not. Left to vLLM are static
scales of the input, of which a fused kernel may hand over an input in E4M3; weights that it padded, or brought in the
order of a kernel (Marlin); scales that are not FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.vllm_plugin.linears import op

_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
RELIED_ON: Mapping[str, Mapping[str, str]] = {
    f"{_KERNELS}.ScaledMMLinearKernel:FP8ScaledMMLinearKernel.apply_weights": {"0.26, 0.32": "e754901f3af79bd8"},
    f"{_KERNELS}.ScaledMMLinearKernel:FP8ScaledMMLinearKernel._get_layer_params": {"0.26, 0.32": "6bdf2860a1888c85"},
    f"{_KERNELS}.BlockScaledMMLinearKernel:Fp8BlockScaledMMLinearKernel.apply_weights": {
        "0.26": "15979c108074db81", "0.32": "fd3080fbb30569a8",
    },
    f"{_KERNELS}.BlockScaledMMLinearKernel:FP8BlockParams": {"0.26": "02ddcedc0aef913a", "0.32": "149cf8e7e899f662"},
    f"{_QUANTIZATION}.fp8:Fp8LinearMethod.apply": {"0.26": "4b29caf7a23628e9", "0.32": "3bd343c45ae4bc9d"},
    f"{_QUANTIZATION}.online.fp8:Fp8PtpcOnlineLinearMethod.apply": {
        "0.26": "c2d9fd47a029ef5b", "0.32": "4acaa371643b650a",
    },
    f"{_QUANTIZATION}.online.fp8:Fp8PerTensorOnlineLinearMethod.apply": {
        "0.26": "4033a005ac84826c", "0.32": "923954ecea5e871c",
    },
    f"{_QUANTIZATION}.online.fp8:Fp8PerBlockOnlineLinearMethod.apply": {"0.26, 0.32": "26ad59654525471a"},
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors:CompressedTensorsLinearMethod.apply": {
        "0.26": "5989bc40e07b5ec9", "0.32": "2be0dfac38e2ff0f",
    },
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8:CompressedTensorsW8A8Fp8.apply_weights": {
        "0.26, 0.32": "1eb7fd68863b6348",
    },
}  # fmt: skip
"""What of vLLM this replaces or counts on -> versions -> `compat.fingerprint` of its source."""
_BLOCK = [128, 128]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a layer in FP8."""

    w: Tensor
    """E4M3 [N, K]."""
    scale: Tensor
    """FP32, as `skinny_gemm` takes it."""
    product: op.Product
    """vLLM's, of any layer of this kind."""
    kernel: str
    """The name of vLLM's class."""


def fp8_weight(layer: Any) -> Fp8Weight | None:
    """Return the weight of a layer whose product our kernel may compute in vLLM's place; None: it is none."""
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel

    kernel = _kernel_of(layer)
    of_blocks = isinstance(kernel, Fp8BlockScaledMMLinearKernel)
    family: Any = Fp8BlockScaledMMLinearKernel if of_blocks else FP8ScaledMMLinearKernel
    if not isinstance(kernel, family) or type(kernel).apply_weights is not family.apply_weights:
        return None
    if kernel.input_quant_key() is not None or getattr(layer, "input_scale", None) is not None:
        return None
    if kernel.config.out_dtype != torch.bfloat16 or layer.weight.dtype != torch.float8_e4m3fn:
        return None
    w = layer.weight if of_blocks else layer.weight.t()
    scale = scale_of(layer)
    size = layer.output_size_per_partition, layer.input_size_per_partition
    if tuple(w.shape) != size or scale.dtype != torch.float32:
        return None
    if of_blocks:
        fits = list(layer.weight_block_size) == _BLOCK and list(scale.shape) == [-(-each // 128) for each in size]
    else:
        fits = scale.numel() == 1 or (scale.numel() == size[0] == scale.shape[0])
    return Fp8Weight(w, scale, _product(kernel, of_blocks), type(kernel).__name__) if fits else None


def scale_of(layer: Any) -> Tensor:
    """Return the scales that vLLM's kernel reads."""
    of_blocks = getattr(layer, "weight_scale_inv", None)
    return layer.weight_scale if of_blocks is None else of_blocks


def _kernel_of(layer: Any) -> Any:
    """Return what multiplies for the layer's method, where that does nothing else; None: it is not known."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    from vllm.model_executor.layers.quantization.online import fp8

    known = (
        Fp8LinearMethod,
        fp8.Fp8PtpcOnlineLinearMethod,
        fp8.Fp8PerTensorOnlineLinearMethod,
        fp8.Fp8PerBlockOnlineLinearMethod,
        CompressedTensorsW8A8Fp8,
    )
    method = layer.quant_method
    multiplies = layer.scheme if type(method) is CompressedTensorsLinearMethod else method
    return multiplies.fp8_linear if type(multiplies) in known else None


def _product(kernel: Any, of_blocks: bool) -> op.Product:
    """Return vLLM's product of tensors, with the quantisation of x: as its own layers call it."""

    def product(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        names = {"weight": w, "weight_scale_inv": scale} if of_blocks else {"weight": w.t(), "weight_scale": scale}
        layer = SimpleNamespace(**{"weight_scale": None, "input_scale": None, "input_scale_ub": None} | names)
        return kernel.apply_weights(layer, x, bias)

    return product
