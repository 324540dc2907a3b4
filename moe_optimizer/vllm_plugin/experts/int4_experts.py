"""What vLLM asks of an experts class for INT4 checkpoints, whatever the device."""

from __future__ import annotations

from typing import Any

from vllm.scalar_type import scalar_types

from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_int4_stored import stored_weights

_INT4 = (scalar_types.uint4b8, scalar_types.uint4)
"""vLLM's types of four bits: around 8, and around zero points."""


def is_int4(weight_key: Any) -> bool:
    """Return whether vLLM's description of weights is one of four-bit integers."""
    return getattr(weight_key, "dtype", None) in _INT4


class Int4Experts:
    """Experts of an INT4 checkpoint; stands before the class of a device."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return is_int4(weight_key) and activation_key is None

    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights of vLLM's layer as it holds them now."""
        return stored_weights(layer)
