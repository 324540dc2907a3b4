"""Registers the torch custom op through which vLLM's dense layers reach our kernel, or the product of stock vLLM.

Which of them computes is looked up when the op runs, by the weight's shape and the number of tokens. A choice in the
arguments would be a part of the compiled graph, which vLLM keeps on disk: a graph depends on what was measured only in
which layers call the op, and that is a part of its key (compile_factor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_optimizer.ops.skinny_gemm import multiply

Kind = tuple[int, int, tuple[int, ...] | None]
"""Outputs and inputs of a weight, and the shape of its scales; None: it is not quantised."""
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Of tokens [T, K] with a weight [N, K], its bias, and its scales."""
_ALIGNMENT = 16
"""Bytes: where the kernel's tokens begin."""


def kind_of(w: Tensor, scale: Tensor | None) -> Kind:
    """Return what weights have in common for which one choice is made."""
    return w.shape[0], w.shape[1], None if scale is None else tuple(scale.shape)


def cublas(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Multiply with a weight that is not quantised, as stock vLLM does."""
    assert scale is None
    return torch.nn.functional.linear(x, w, bias)


@dataclass(slots=True)
class ChosenLinears:
    """What the op looks up in this process, which has one model."""

    max_tokens: Mapping[Kind, int] = field(default_factory=dict)
    """Up to how many tokens our kernel computes; others are multiplied as in stock vLLM."""
    stock: Mapping[Kind, Product] = field(default_factory=dict)
    """How stock vLLM multiplies, for all quantised weights of the model."""
    on_use: Callable[[], None] | None = None
    """Called when our kernel is launched for a forward."""

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        """Return x w^T + bias, by our kernel where it was chosen."""
        kind = kind_of(w, scale)
        if x.dim() != 2 or not 0 < x.shape[0] <= self.max_tokens.get(kind, 0) or not _is_readable(x):
            product = cublas if scale is None else self.stock[kind]
            return product(x, w, bias, scale)
        if self.on_use is not None:
            self.on_use()
        return multiply(x, w, bias, scale)


def _is_readable(x: Tensor) -> bool:
    return (
        x.stride(1) == 1
        and x.data_ptr() % _ALIGNMENT == 0
        and (x.shape[0] == 1 or x.stride(0) * x.element_size() % _ALIGNMENT == 0)
    )


chosen = ChosenLinears()


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    return chosen.linear(x, w, bias, scale)


def _linear_in_trace(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:  # noqa: ARG001 - schema
    return torch.empty((*x.shape[:-1], w.shape[0]), dtype=x.dtype, device=x.device)


_library = torch.library.Library("moe_optimizer_vllm", "FRAGMENT")
_library.define("linear(Tensor x, Tensor w, Tensor? bias, Tensor? scale) -> Tensor")
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("moe_optimizer_vllm::linear", _linear_in_trace, lib=_library)
