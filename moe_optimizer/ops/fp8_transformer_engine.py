"""NVIDIA's Transformer Engine as a quantiser of 128x128 blocks. Optional; imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from moe_optimizer.ops.reference import SCALE_BLOCK

_QUANTIZER_MODULE = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
_BINDINGS_MODULE = "transformer_engine_torch"


def why_not_transformer_engine(device: torch.device, *, granularity: str) -> str:
    """Return why it cannot convert tensors on `device`, or ""."""
    if granularity != "block":
        return "it has no scales per output channel"
    if device.type != "cuda":
        return f"it converts tensors on CUDA devices, found {device.type}"
    try:
        _modules()
    except (ImportError, OSError) as error:  # OSError: a shared library of it does not load
        return f"it cannot be imported: {error}"
    return ""


def quantize_with_transformer_engine(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [N, K] in E4M3 and its scales [ceil(N/128), ceil(K/128)], as `quantize_fp8` does.

    The scales are asked for as plain FP32 numbers: rounded up to powers of two, which is its default, they would be
    others than those of the built-in quantiser.
    """
    quantizers, bindings = _modules()
    quantizer = quantizers.Float8BlockQuantizer(
        bindings.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=False,
        block_scaling_dim=2,
    )
    result = quantizer(matrix.contiguous())
    rows, columns = (-(-size // SCALE_BLOCK) for size in matrix.shape)
    # Its scales are padded in both directions for its matrix products.
    scale = result._rowwise_scale_inv[:rows, :columns].contiguous()
    quantized = result._rowwise_data.view(torch.float8_e4m3fn).view(matrix.shape)
    return quantized, scale


def _modules() -> tuple[ModuleType, ModuleType]:
    return importlib.import_module(_QUANTIZER_MODULE), importlib.import_module(_BINDINGS_MODULE)
