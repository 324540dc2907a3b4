"""Finds the dense layers of a loaded model whose products our kernel can compute, in BF16 and in FP8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from moe_optimizer.ops.skinny_gemm import dequantized, multiply, why_no_kernel
from moe_optimizer.vllm_plugin.linears import op
from moe_optimizer.vllm_plugin.linears.fp8_layers import fp8_weight


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A dense layer of vLLM, and what multiplies with its weight."""

    module: Any
    w: Tensor
    """[N, K], BF16 or E4M3."""
    bias: Tensor | None
    scale: Tensor | None = None
    """Of an E4M3 weight, as `skinny_gemm` takes it."""
    stock_product: op.Product = op.cublas
    stock_name: str = "cuBLAS"

    @property
    def kind(self) -> op.Kind:
        """What decides for this layer and those like it."""
        return op.kind_of(self.w, self.scale)

    def ours(self, x: Tensor) -> Tensor:
        """Return the product by our kernel."""
        return multiply(x, self.w, self.bias, self.scale)

    def stock(self, x: Tensor) -> Tensor:
        """Return the product as stock vLLM computes it, with the quantisation of x where it does that."""
        return self.stock_product(x, self.w, self.bias, self.scale)

    def exact(self, x: Tensor) -> Tensor:
        """Return the product with float32 sums of the weight that the layer's stands for, in float32."""
        if self.scale is None:
            return self.stock(x).float()
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(x.float(), dequantized(self.w, self.scale), bias)


def dense_layers(model: torch.nn.Module, *, fp8: bool) -> Iterator[tuple[str, DenseLayer]]:
    """Yield the layers that vLLM multiplies by cuBLAS in BF16, and with `fp8` those in FP8, by name, in model order.

    Not replicated ones, such as gates: their products are small, and the choice of experts hangs on them.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    modules: Iterable[tuple[str, Any]] = model.named_modules()  # vLLM's own attributes, which torch does not declare
    for name, module in modules:
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            continue
        layer = _in_bf16(module) or (_in_fp8(module) if fp8 else None)
        if layer is not None and _covers(layer):
            yield name, layer


def _in_bf16(module: Any) -> DenseLayer | None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    if type(module.quant_method) is not UnquantizedLinearMethod:
        return None
    # From 0.32 on the user can have another backend multiply.
    if getattr(module.quant_method, "_gemm_impl", default_unquantized_gemm) is not default_unquantized_gemm:
        return None
    return DenseLayer(module, module.weight, module.bias)


def _in_fp8(module: Any) -> DenseLayer | None:
    found = fp8_weight(module)
    if found is None:
        return None
    return DenseLayer(module, found.w, module.bias, found.scale, found.product, f"vLLM's FP8 ({found.kernel})")


def _covers(layer: DenseLayer) -> bool:
    rows, depth = layer.w.shape
    x, out = (torch.empty((1, size), dtype=torch.bfloat16, device=layer.w.device) for size in (depth, rows))
    return why_no_kernel(SkinnyGemm(x, layer.w, layer.bias, out, layer.scale)) is None
