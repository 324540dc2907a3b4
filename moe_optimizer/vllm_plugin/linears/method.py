"""The quantisation method of vLLM's unquantised dense layers, with our op as its product."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

import moe_optimizer.vllm_plugin.linears.op  # noqa: F401 - registers the op


class SkinnyLinearMethod(UnquantizedLinearMethod):
    """vLLM's method in all but the product.

    Args:
        stock: the layer's own.
    """

    def __init__(self, stock: UnquantizedLinearMethod) -> None:
        vars(self).update(vars(stock))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Return the product; called while a graph is traced."""
        return torch.ops.moe_optimizer_vllm.linear(x, layer.weight, bias)
