"""vLLM's experts interface over this package's fused experts kernel.

Inside vLLM only. The class answers for what it was shown to compute; a "no" carries a reason and leaves the
layer to the next class in vLLM's order.
"""

# The signatures are vLLM's; it passes their arguments by name.
# ruff: noqa: ARG002, N803, PLR0917, PLW0211

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from moe_optimizer.vllm_plugin import kernel
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, current
from moe_optimizer.vllm_plugin.experts_op import describe_layer, run_experts
from moe_optimizer.vllm_plugin.proof import described

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"
# SwiGLU variants that vLLM parametrises on the layer: silently ignoring one would change the model.
_SWIGLU_PARAMETERS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")


class MoeOptimizerExperts(mk.FusedMoEExpertsModular):
    """SwiGLU experts in FP32, BF16 or FP16 on CPU, with or without an expert map.

    Weights stay as vLLM loads them ([E, 2 I, H] with the gate rows first, [E, H, I]); the stock CPU class packs
    them in its own `process_weights_after_loading`, which does not run when this class is chosen.
    """

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The kernel reads the activations as the layer gives them."""
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """One row per token, as the router leaves them."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],  # pyright: ignore[reportSelfClsParameterName] - vLLM's own shape
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Return whether the kernel computes this layer, and why not; the proof gets the answer too.

        Raises:
            RequiredNotAppliedError: no, and the plan requires the kernel.
        """
        activation = current()
        if activation is None:
            return False, "moe-optimizer is not active in this process"
        try:
            supported, reason = mk.FusedMoEExperts.is_supported_config(
                cls, moe_config, weight_key, activation_key, activation_format
            )
            if supported:
                reason = _unsupported_reason(moe_config)
            elif not reason:
                reason = "vLLM says no without a reason"
            if not reason:
                activation.applied(EXPERTS_PASS, kernel=f"{kernel.NAME} (cpu)", isa=kernel.isa())
                return True, None
        except Exception as error:  # noqa: BLE001 - vLLM is choosing a kernel; stock must stay reachable
            reason = f"fallback: {described(error)}"
        activation.refused(EXPERTS_PASS, reason)
        return False, reason

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

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
        # Tensor and expert parallelism were compared with stock. Data parallelism adds a dispatch between the
        # ranks, and EPLB moves weights under the kernel: neither was.
        return moe_parallel_config.dp_size == 1 and not getattr(moe_parallel_config, "enable_eplb", False)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        # The op's contract: bit for bit the same for any other tokens in the batch.
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Name the layer in the proof; the weights need no other layout."""
        activation = current()
        weights = layer.w13_weight
        if activation is None or not isinstance(weights, torch.Tensor):
            return
        has_map = getattr(layer, "expert_map", None) is not None
        entry = describe_layer(str(getattr(layer, "layer_name", "")), weights, has_map=has_map)
        activation.add_layer(EXPERTS_PASS, weights.data_ptr(), entry)

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace: the kernel keeps its own scratch. Output: one row of the model width per token."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to do: the kernel weights and sums the experts of a token."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Compute the routed experts of every token into `output` ([T, H])."""
        if apply_router_weight_on_input:
            # vLLM's prepare step has multiplied the input with them; a second time would square them.
            topk_weights = torch.ones_like(topk_weights)
        run_experts(
            output,
            hidden_states,
            w1,
            w2,
            topk_weights.to(torch.float32),
            topk_ids,
            expert_map,
            self.w1_bias,
            self.w2_bias,
        )


def _unsupported_reason(moe_config: Any) -> str:
    """Return why a layer that passed vLLM's own questions is still not ours, or ""."""
    if moe_config.in_dtype not in _DTYPES:
        return f"kernel does not support {moe_config.in_dtype} activations"
    for name in _SWIGLU_PARAMETERS:
        if getattr(moe_config, name, None) is not None:
            return f"kernel does not support {name}={getattr(moe_config, name)}"
    if importlib.util.find_spec(_CPU_ROUTER) is None:
        return "vLLM's CPU build routes tokens inside its own kernel before 0.30"
    not_covered = kernel.why_not_covered(
        moe_config.in_dtype,
        num_experts=moe_config.num_local_experts,
        hidden=moe_config.hidden_dim,
        intermediate=moe_config.intermediate_size_per_partition,
        top_k=moe_config.experts_per_token,
    )
    if not_covered:
        return f"no kernel for this layer: {not_covered}"
    wrong = kernel.self_test(moe_config.in_dtype)
    return f"fallback: kernel self-test failed: {wrong}" if wrong else ""
