"""The experts class for checkpoints that are in four bits, on vLLM's CPU build, whose own kernels need AMX."""

from __future__ import annotations

from typing import Any

import torch

from moe_optimizer.vllm_plugin.experts.cpu import MoeOptimizerCpuExperts
from moe_optimizer.vllm_plugin.experts.stored import StoredExperts
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.session import current_session


class MoeOptimizerStoredCpuExperts(StoredExperts, MoeOptimizerCpuExperts):
    """Experts in four bits as the checkpoint has them."""

    _biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def w1_bias(self) -> torch.Tensor | None:
        """FP32 [E, 2I], once the layer is loaded."""
        return self._biases[0]

    @property
    def w2_bias(self) -> torch.Tensor | None:
        """FP32 [E, H], once the layer is loaded."""
        return self._biases[1]

    def finish_loading(self, layer: Any) -> None:
        """Check the kernel on the layer's weights and enter it in the proof.

        Raises:
            RequiredNotAppliedError: the kernel is wrong; no other reads the weights as they are.
        """
        session = current_session()
        if session is None:
            return
        self._biases = self.stored_biases(layer)
        weights = self.stored_weights(layer)
        self.serve(session, layer, weights, loaded_bytes=weights.nbytes)

    def keep(self, layer: Any, weights: KernelWeights) -> None:
        """The layer's parameters are the weights."""
