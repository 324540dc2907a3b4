"""The quantisation methods of vLLM's dense layers, with our op as their product."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

import moe_optimizer.vllm_plugin.linears.op  # noqa: F401 - registers the op
from moe_optimizer.vllm_plugin.linears.fp8_layers import scale_of


class SkinnyLinearMethod(UnquantizedLinearMethod):
    """vLLM's method in all but the product.

    Args:
        stock: the layer's own.
    """

    def __init__(self, stock: UnquantizedLinearMethod) -> None:
        vars(self).update(vars(stock))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Return the product; called while a graph is traced."""
        return torch.ops.moe_optimizer_vllm.linear(x, layer.weight, bias, None)


def skinny_fp8_method(stock: LinearMethodBase, *, is_transposed: bool) -> Any:
    """Return a method of an FP8 layer that is `stock` in all but the product, also to what asks for its class.

    Args:
        stock: the layer's own.
        is_transposed: whether the layer holds its weight as [K, N].
    """
    return _skinny_class(type(stock))(stock, is_transposed)


@functools.cache
def _skinny_class(stock_class: type) -> type:
    return type(f"Skinny{stock_class.__name__}", (_SkinnyFp8Product, stock_class), {})


class _SkinnyFp8Product:
    def __init__(self, stock: LinearMethodBase, is_transposed: bool) -> None:
        vars(self).update(vars(stock))
        self.weight_is_transposed = is_transposed

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Return the product; called while a graph is traced."""
        weight: Any = layer.weight
        w = weight.t() if self.weight_is_transposed else weight
        return torch.ops.moe_optimizer_vllm.linear(x, w, bias, scale_of(layer))
