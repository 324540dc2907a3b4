"""Converts the experts' weights of a layer to a format with fewer bits, within the plan's budget of change."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from moe_optimizer.errors import described
from moe_optimizer.plan.pass_params import FourBitParams, Fp8Params
from moe_optimizer.specs.layer_name import decoder_layer
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, WeightFormat
from moe_optimizer.vllm_plugin.session import current_decision

if TYPE_CHECKING:
    import torch


class QuantizedWeights(WeightFormat):
    """Weights with scales; `ops.fused_experts` reads them in place.

    A layer stays plain where the plan keeps it, and where its output would change by more than the plan's budget. One
    that cannot be converted, for example because a weight is not finite, stays plain too and counts as refused.
    """

    pass_name: ClassVar[str]
    """The pass that asks for the format."""
    params: ClassVar[type[Fp8Params] | type[FourBitParams]]
    """What its decision holds."""
    words: ClassVar[str]
    """The format, as subject of a sentence."""

    def convert(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer in the format as the plan wants it, or plain.

        Raises:
            RequiredNotAppliedError: it cannot be converted, and the plan requires that it is.
        """
        session, decision = current_decision(self.pass_name)
        params = decision.params_as(self.params)
        if decoder_layer(layer_name) in params.excluded_layers:
            return _plain(w13, w2, "kept by the plan")
        try:
            converted = self._with_error(w13, w2, params)
        except Exception as error:  # noqa: BLE001 - vLLM is loading its model; the loaded weights do as well
            session.refused(self.pass_name, f"{layer_name}: fallback: {described(error)}")
            return _plain(w13, w2, "could not be converted")
        beyond = self._beyond_budget(converted, params)
        return _plain(w13, w2, beyond, converted.output_error) if beyond else converted

    def convert_again(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer's new weights in the format; an output that they change by more than the budget is in the
        proof.

        Raises:
            RequiredNotAppliedError: it is, and the plan requires the format within that budget.
        """
        session, decision = current_decision(self.pass_name)
        params = decision.params_as(self.params)
        converted = self._with_error(w13, w2, params)
        beyond = self._beyond_budget(converted, params)
        if beyond:
            # The compiled graphs read the format: the layer cannot go back to the weights as loaded.
            session.refused(self.pass_name, f"{layer_name}: with new weights {beyond}")
        return converted

    @abstractmethod
    def quantized(self, w13: torch.Tensor, w2: torch.Tensor, params: Any) -> KernelWeights:
        """Return the weights in the format."""

    def _with_error(self, w13: torch.Tensor, w2: torch.Tensor, params: Fp8Params | FourBitParams) -> KernelWeights:
        """Return the weights in the format, with the change of the layer's output where the plan bounds it."""
        from moe_optimizer.ops.experts_error import experts_output_error

        converted = self.quantized(w13, w2, params)
        if params.max_layer_error is None:
            return converted
        return converted._replace(output_error=experts_output_error(w13, w2, *self.operands(converted)))

    def _beyond_budget(self, converted: KernelWeights, params: Fp8Params | FourBitParams) -> str:
        """Return how far the output changes beyond what the plan allows, or ""."""
        error, most = converted.output_error, params.max_layer_error
        # Written so that an error that is not a number is too large.
        if error is None or most is None or error <= most:
            return ""
        return f"{self.words} its output by {error:.3g}, allowed are {most:g}"


def _plain(w13: torch.Tensor, w2: torch.Tensor, why: str, error: float | None = None) -> KernelWeights:
    return KernelWeights(format=PLAIN, w13=w13, w2=w2, output_error=error, why_plain=why)
