"""The experts class for checkpoints that are in four bits, on a GPU: no kernel of vLLM's reads them as ours do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, STOCK, TokenRange
from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts, QuantKeys
from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
from moe_optimizer.vllm_plugin.experts.cuda_layer import CudaLayer
from moe_optimizer.vllm_plugin.experts.stored import StoredExperts
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_decision, current_session

_CHECKED_TOKENS = 256
"""Chosen: the canary tries every larger number of tokens before the server is ready."""
_NOTHING_ELSE = "no kernel of vLLM's reads the experts as they are held here"
_HINT = "serve with --disable-flash-dmoe: vLLM then repacks them for a kernel of its own"


class NothingBeside:
    """Stands where other layers have vLLM's own experts: none computes weights that were not repacked for it."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        pass

    @staticmethod
    def is_supported_config(*_asked: Any) -> tuple[bool, str | None]:
        """Nothing is needed of it."""
        return True, None

    workspace_shapes = MoeOptimizerExperts.workspace_shapes
    finalize_weight_and_reduce_impl = MoeOptimizerExperts.finalize_weight_and_reduce_impl

    def apply(self, *_arguments: Any, **_named: Any) -> NoReturn:
        """Refuse a forward.

        Raises:
            RequiredNotAppliedError: always.
        """
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {_NOTHING_ELSE}", hint=_HINT)


class MoeOptimizerStoredCudaExperts(StoredExperts, MoeOptimizerCudaExperts):
    """Experts in four bits as the checkpoint has them, at every number of tokens."""

    stock_classes: ClassVar[Any] = (NothingBeside,)

    @classmethod
    def weight_kind(cls, moe_config: Any, keys: QuantKeys) -> str:  # noqa: ARG003 - one kind
        """Return the name of this layer's weights in the plan's dispatch."""
        (kind,) = _planned_dispatch()
        return kind

    @classmethod
    def why_not(cls, moe_config: Any, keys: QuantKeys, session: PluginSession) -> str:
        """Return why vLLM computes this layer with repacked weights, or ""."""
        reason = super().why_not(moe_config, keys, session)
        if reason:
            return reason
        ranges = _planned_ranges()
        if ranges[-1].up_to < ANY_NUMBER or any(each.use == STOCK for each in ranges):
            return f"{_NOTHING_ELSE}, and the plan has none of ours for some numbers of tokens"
        return ""

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        # vLLM has no EPLB for the methods of these checkpoints.
        if getattr(moe_parallel_config, "enable_eplb", False):
            return False
        return MoeOptimizerCudaExperts._supports_parallel_config(moe_parallel_config)

    def finish_loading(self, layer: Any) -> None:
        """Check our kernels on the layer's weights and enter it in the proof.

        Raises:
            RequiredNotAppliedError: a kernel is wrong; no other reads the weights as they are.
        """
        session = current_session()
        if session is None:
            return
        self._name = str(getattr(layer, "layer_name", ""))
        self.biases = self.stored_biases(layer)
        weights = self.stored_weights(layer)
        held = CudaLayer(
            self._described(weights, getattr(layer, "expert_map", None)),
            _planned_ranges(),
            loaded_bytes=weights.nbytes,
            weight_bytes=weights.nbytes,
        )
        held.check(session, tokens=_CHECKED_TOKENS)
        if not held.has_kernels:
            why = session.proof.passes[EXPERTS_PASS].why_not
            raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {why}; {_NOTHING_ELSE}", hint=_HINT)
        self._layer = held

    def kernel_weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[KernelWeights, str]:  # noqa: ARG002 - none are known
        """Refuse a layer whose loading was not finished: its scales and biases are not known.

        Raises:
            RequiredNotAppliedError: always.
        """
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: vLLM calls a layer before it is loaded", hint=_HINT)

    def compute(self, call: VllmCall) -> Any:
        """Compute the routed experts of every token into `call.output`, or once vLLM names the output."""
        x = call.hidden_states
        if not self._layer_of(call).covers(x):
            call = call._replace(hidden_states=x.clone(memory_format=torch.contiguous_format))
        return super().compute(call)

    def unknown_call(self, named: dict[str, Any], why: str) -> Any:  # noqa: ARG002 - nothing else computes it
        """Refuse a call that is not as known.

        Raises:
            RequiredNotAppliedError: always.
        """
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {why}", hint=_HINT)


def _planned_ranges() -> tuple[TokenRange, ...]:
    (ranges,) = _planned_dispatch().values()
    return ranges


def _planned_dispatch() -> Mapping[str, tuple[TokenRange, ...]]:
    """Return the plan's dispatch, which has one kind of weights for these layers."""
    return current_decision(EXPERTS_PASS)[1].params_as(FlashDmoeParams).dispatch
