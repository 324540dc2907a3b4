"""One loaded MoE layer as the kernels see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_optimizer.proof.record import LayerProof
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, WeightFormat, weight_format


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLayer:
    """The weights of one layer with what a kernel call needs beside them. E local experts, H hidden size."""

    name: str
    """As vLLM has it; "" where it does not say."""
    weights: KernelWeights
    dtype: torch.dtype
    """Of the activations."""
    top_k: int
    expert_map: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    """[E, 2I]."""
    w2_bias: torch.Tensor | None = None
    """[E, H]."""

    @property
    def format(self) -> WeightFormat:
        """How the weights are stored, and what computes with them."""
        return weight_format(self.weights.format)

    @property
    def num_local_experts(self) -> int:
        """E."""
        return self.weights.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.weights.w2.shape[1]

    def proof(self, **known: Any) -> LayerProof:
        """Return the layer's entry in the proof.

        Args:
            known: further fields of it.
        """
        plain = self.weights.format == PLAIN
        return LayerProof(
            name=self.name,
            num_local_experts=self.num_local_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.weights.w13.shape[1] // 2,
            dtype=dtype_name(self.dtype),
            expert_map=self.expert_map is not None,
            weight_format=self.weights.format,
            weight_dtype="" if plain else dtype_name(self.weights.w13.dtype),
            **known,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A layer that our kernels serve, as the canary tries it."""

    layer: ExpertsLayer
    """With the weights that vLLM's layer holds now, whatever the kernels read."""
    sizes: Mapping[str, tuple[int, ...]]
    """Kernel -> numbers of tokens at which it is tried."""
    rounding: frozenset[str] = frozenset()
    """The kernels that quantise the activations."""
    num_experts: int
    """Experts that are tried."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the proof writes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
