"""Implements vLLM's experts interface over this package's kernels, as far as the classes for CPU and CUDA share it.

A class accepts only layers that its kernels were shown to compute. A refusal carries a reason and leaves the layer to
the next class in vLLM's order.
"""

# ruff: noqa: PLW0211 - vLLM's own shape of is_supported_config

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.vllm_plugin.experts.layer import Served
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall, unknown_interface
from moe_optimizer.vllm_plugin.experts.weight_format import planned_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session

# Parameters of SwiGLU variants on vLLM's layer: ignoring one would change the model.
_SWIGLU_PARAMETERS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")

QuantKeys = tuple[Any, Any]
"""How vLLM describes the quantisation of weights and activations; (None, None) is unquantised."""


class MoeOptimizerExperts(mk.FusedMoEExpertsModular):
    """SwiGLU experts, with or without an expert map, on weights that vLLM hands over as it loads them.

    They are [E, 2 I, H] with the gate rows first, and [E, H, I]: vLLM's own classes pack or shuffle them only in their
    `process_weights_after_loading`.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]]
    """Of the activations."""
    stock_classes: ClassVar[tuple[type[mk.FusedMoEExperts], ...]] = ()
    """vLLM's classes for the same backend, in its order; set when the class is offered."""

    @classmethod
    @abstractmethod
    def kernel_name(cls) -> tuple[str, str]:
        """Return the kernel's name and instruction set for the proof."""

    @classmethod
    @abstractmethod
    def why_not(cls, moe_config: Any, keys: QuantKeys, session: PluginSession) -> str:
        """Return why the kernel does not compute a layer that passed vLLM's own questions, or ""."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The kernels read the activations as the layer gives them."""
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """One row per token, as the router leaves them."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],  # vLLM's own shape
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Return whether the kernel computes this layer, and why not; the proof gets the answer too.

        Raises:
            RequiredNotAppliedError: no, and the plan requires the kernel.
        """
        assert issubclass(cls, MoeOptimizerExperts), cls
        session = current_session()
        if session is None:
            return False, "moe-optimizer is not active in this process"
        pass_names: tuple[str, ...] = (EXPERTS_PASS,)
        try:
            wanted = planned_format(session)
            pass_names = wanted.passes
            supported, reason = mk.FusedMoEExperts.is_supported_config(
                cls, moe_config, weight_key, activation_key, activation_format
            )
            if supported:
                reason = (
                    unknown_interface()
                    or _unsupported_reason(cls, moe_config)
                    or cls.why_not(moe_config, (weight_key, activation_key), session)
                    or wanted.why_not(moe_config)
                )
            elif not reason:
                reason = "vLLM says no without a reason"
            if not reason:
                name, isa = cls.kernel_name()
                for pass_name in pass_names:
                    session.applied(pass_name, kernel=name, isa=isa)
                return True, None
        except RequiredNotAppliedError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM is choosing a kernel; its own must stay reachable
            reason = f"fallback: {described(error)}"
        for pass_name in pass_names:
            session.refused(pass_name, reason)
        return False, reason

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        # Tensor and expert parallelism were compared with stock vLLM on the CPU build too. Data parallelism, which
        # exchanges tokens between ranks, was not there, and EPLB is for GPUs only.
        return moe_parallel_config.dp_size == 1 and not getattr(moe_parallel_config, "enable_eplb", False)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        # By the op's contract a token's result does not depend on the other tokens of the batch.
        return True

    def workspace_shapes(self, *sizes: Any, **_named: Any) -> Any:
        """No workspace: the kernel keeps its own scratch. Output: one row of the model width per token."""
        tokens, _, hidden, *_ = sizes
        return (0,), (0,), (tokens, hidden)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Return what does nothing: the kernel weights and sums the experts of a token."""
        return TopKWeightAndReduceNoOP()

    def apply(self, *arguments: Any, **named: Any) -> Any:
        """Pass vLLM's arguments to `compute` as one; a call of another shape goes to vLLM's own experts."""
        try:
            call = VllmCall(*arguments, **named)
        except TypeError as error:
            return self.unknown_call(named, f"vLLM calls its experts in another way than known: {described(error)}")
        return self.compute(call)

    @abstractmethod
    def compute(self, call: VllmCall) -> Any:
        """Compute the routed experts of every token, with our kernels or by handing the call to vLLM's own experts."""

    @abstractmethod
    def unknown_call(self, named: dict[str, Any], why: str) -> Any:
        """Have vLLM's own experts compute a call whose arguments are not those of `VllmCall`.

        Raises:
            RequiredNotAppliedError: there are none beside ours, or the plan requires ours.
        """

    def finish_loading(self, layer: Any) -> None:
        """Do what is left once vLLM has processed the loaded weights of its layer: nothing.

        `process_weights_after_loading` is vLLM's own call for it, which some versions make for some layers only.
        """

    def weights_changed(self, layer: Any) -> None:
        """Bring up to date what the kernels keep beside the weights that vLLM has changed in place: nothing."""

    @abstractmethod
    def served(self, layer: Any, *, largest: int, position: int) -> Served | None:
        """Return what the canary tries of this layer; None where our kernels do not compute it.

        Args:
            layer: vLLM's.
            largest: most tokens of a forward.
            position: of the layer among those of its shape; the first one tries what depends on the shape alone.
        """


def _unsupported_reason(cls: type[MoeOptimizerExperts], moe_config: Any) -> str:
    if moe_config.in_dtype not in cls.dtypes:
        return f"kernel does not support {moe_config.in_dtype} activations"
    for name in _SWIGLU_PARAMETERS:
        if getattr(moe_config, name, None) is not None:
            return f"kernel does not support {name}={getattr(moe_config, name)}"
    return ""
