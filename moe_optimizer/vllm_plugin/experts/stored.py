"""What an experts class for a checkpoint in four bits tells of a layer, on every device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights


class StoredExperts(ABC):
    """Experts that are computed as the checkpoint has them."""

    def process_weights_after_loading(self, layer: Any) -> None:  # noqa: B027
        """Do nothing: vLLM calls it, if at all, before the weights are as the kernels read them."""

    @abstractmethod
    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights of vLLM's layer as it holds them now."""

    def stored_biases(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # noqa: ARG002
        """Return the biases of vLLM's layer: it has none."""
        return None, None
