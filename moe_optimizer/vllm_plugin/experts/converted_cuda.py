"""The experts class for layers that the plugin converts on a GPU: our CUDA kernels are the only ones that read them."""

from __future__ import annotations

from typing import Any

import torch

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.vllm_plugin.experts.base import QuantKeys
from moe_optimizer.vllm_plugin.experts.converted_layer import convert_when_loaded_again, is_converted, put_weights
from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
from moe_optimizer.vllm_plugin.experts.cuda_layer import CudaLayer
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, planned_format, weight_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_decision, current_session

_CHECKED_TOKENS = 256
"""Chosen: the canary tries every larger number of tokens before the server is ready."""


class MoeOptimizerConvertedCudaExperts(MoeOptimizerCudaExperts):
    """SwiGLU experts that are loaded in BF16 and held in another format.

    Each layer is tried on its converted weights while those that were loaded are still there: one that is wrong stays
    BF16, and so does one that the plan keeps. Once a layer is converted, vLLM's own experts cannot compute it.
    """

    _weights: KernelWeights | None = None
    """The layer's, if it was converted."""

    @classmethod
    def weight_kind(cls, moe_config: Any, keys: QuantKeys) -> str:
        """Return the name of this layer's weights in the plan's dispatch."""
        session = current_session()
        planned = PLAIN if session is None else planned_format(session).name
        return super().weight_kind(moe_config, keys) if planned == PLAIN else planned

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        # vLLM's EPLB was never run on packed weights.
        if getattr(moe_parallel_config, "enable_eplb", False):
            return False
        return MoeOptimizerCudaExperts._supports_parallel_config(moe_parallel_config)

    def finish_loading(self, layer: Any) -> None:
        """Convert the layer's weights to the planned format, try its kernels, and enter it in the proof.

        Raises:
            RequiredNotAppliedError: it cannot be converted or a kernel is wrong, and the plan requires it.
        """
        session = current_session()
        if session is None or is_converted(layer):
            return
        loaded = (layer.w13_weight, layer.w2_weight)
        name = self._name = str(getattr(layer, "layer_name", ""))
        weights = planned_format(session).convert(name, *loaded)
        held = self._held(weights, layer, loaded_bytes=sum(weight.nbytes for weight in loaded))
        held.check(session, tokens=_CHECKED_TOKENS)
        if weights.format != PLAIN and not held.has_kernels:
            why = "its kernels are wrong on the converted weights"
            weights = KernelWeights(format=PLAIN, w13=loaded[0], w2=loaded[1], why_plain=why)
            held = self._held(weights, layer, loaded_bytes=weights.nbytes)
            held.check(session, tokens=_CHECKED_TOKENS)
        self._layer = held
        if weights.format != PLAIN:
            self._weights = weights
            put_weights(layer, weights)
            convert_when_loaded_again(layer, weights, self._converted_again)

    def _held(self, weights: KernelWeights, layer: Any, *, loaded_bytes: int) -> CudaLayer:
        ranges = current_decision(EXPERTS_PASS)[1].params_as(FlashDmoeParams).dispatch
        kind = self.kernel_weights(weights.w13, weights.w2)[1] if weights.format == PLAIN else weights.format
        return CudaLayer(
            self._described(weights, getattr(layer, "expert_map", None)),
            ranges.get(kind, ()),
            passes=weight_format(weights.format).passes,
            loaded_bytes=loaded_bytes,
            weight_bytes=weights.nbytes,
            output_error=weights.output_error,
            why_plain=weights.why_plain,
        )

    def _converted_again(self, layer: Any) -> KernelWeights:
        """Return new weights of a loaded layer in the format that captured graphs read."""
        assert self._weights is not None, "registered when it was converted"
        session, held = current_session(), self._weights
        name = str(getattr(layer, "layer_name", ""))
        again = weight_format(held.format).convert_again(name, layer.w13_weight, layer.w2_weight)
        if session is not None:
            session.layer_at(held.w13.data_ptr()).output_error = again.output_error
            session.writer.touch()
        return again

    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights of vLLM's layer as it holds them now."""
        if self._weights is None:
            return super().stored_weights(layer)
        held = {name: getattr(layer, name) for name in self._weights.parameters}
        return self._weights.with_parameters(held)

    def compute(self, call: VllmCall) -> Any:
        """Compute the routed experts of every token into `call.output`, or once vLLM names the output."""
        x = call.hidden_states
        if self._weights is not None and not self._layer_of(call).covers(x):
            call = call._replace(hidden_states=x.clone(memory_format=torch.contiguous_format))
        return super().compute(call)

    def unknown_call(self, named: dict[str, Any], why: str) -> Any:
        """Hand a layer that stayed BF16 to vLLM's own experts, and refuse the others, which nothing else computes.

        Raises:
            RequiredNotAppliedError: the layer is converted, or the plan requires our kernels.
        """
        if self._weights is None:
            return super().unknown_call(named, why)
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {why}", hint="serve without the pass that converts the experts")
