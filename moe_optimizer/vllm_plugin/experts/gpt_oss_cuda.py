"""The experts class for gpt-oss's checkpoints on a GPU: our CUDA kernels read MXFP4 as it is stored."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.expert_formats import MXFP4
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, STOCK, TokenRange
from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts, QuantKeys
from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
from moe_optimizer.vllm_plugin.experts.cuda_layer import CudaLayer
from moe_optimizer.vllm_plugin.experts.gpt_oss_experts import GptOssExperts
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_gpt_oss import stored_biases, stored_weights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_decision, current_session

_CHECKED_TOKENS = 256
"""Chosen: the canary tries every larger number of tokens before the server is ready."""
_NOTHING_ELSE = "no kernel of vLLM's reads gpt-oss's experts as they are stored"
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


class MoeOptimizerGptOssCudaExperts(GptOssExperts, MoeOptimizerCudaExperts):
    """Experts in MXFP4 as stored, with biases and the clamped activation, at every number of tokens."""

    stock_classes: ClassVar[Any] = (NothingBeside,)
    has_biases: ClassVar[bool] = True

    @classmethod
    def weight_kind(cls, moe_config: Any, keys: QuantKeys) -> str:  # noqa: ARG003 - one kind
        """Return the name of this layer's weights in the plan's dispatch."""
        return MXFP4

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
        # vLLM has no EPLB for gpt-oss's method.
        if getattr(moe_parallel_config, "enable_eplb", False):
            return False
        return MoeOptimizerCudaExperts._supports_parallel_config(moe_parallel_config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: vLLM calls it, if at all, before the biases are as the kernels read them."""

    def finish_loading(self, layer: Any) -> None:
        """Check our kernels on the layer's weights and enter it in the proof.

        Raises:
            RequiredNotAppliedError: a kernel is wrong; no other reads the weights as they are.
        """
        session = current_session()
        if session is None:
            return
        self._name = str(getattr(layer, "layer_name", ""))
        self.biases = stored_biases(layer)
        weights = stored_weights(layer)
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

    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights of vLLM's layer as it holds them now."""
        return stored_weights(layer)

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
    return current_decision(EXPERTS_PASS)[1].params_as(FlashDmoeParams).dispatch[MXFP4]
