"""The experts class for vLLM's CPU build."""

# The signatures are vLLM's; it passes their arguments by name.
# ruff: noqa: ARG002, PLR0917

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.platforms import current_platform

from moe_optimizer.vllm_plugin import kernel
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation, current
from moe_optimizer.vllm_plugin.experts import MoeOptimizerExperts
from moe_optimizer.vllm_plugin.experts_op import dtype_name, run_experts
from moe_optimizer.vllm_plugin.proof import LayerProof
from moe_optimizer.vllm_plugin.weight_format import PLAIN, KernelWeights, planned_format, weight_format

_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"


class MoeOptimizerCpuExperts(MoeOptimizerExperts):
    """SwiGLU experts in FP32, BF16 or FP16 on the CPU; the plan may want the weights in another format."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    weights: KernelWeights | None = None
    """Set once the layer is loaded."""

    @classmethod
    def kernel_name(cls) -> tuple[str, str]:
        """Return the kernel's name and instruction set for the proof."""
        return f"{kernel.NAME} (cpu)", kernel.isa()

    @classmethod
    def why_not(cls, moe_config: Any, activation: Activation) -> str:  # noqa: ARG003
        """Return why the kernel cannot compute this layer here, or "": the last question tries it."""
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

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Bring the weights into the planned format, in place of the loaded ones, and name the layer in the proof."""
        from vllm.model_executor.utils import replace_parameter

        activation = current()
        loaded = (layer.w13_weight, layer.w2_weight)
        if activation is None or not all(isinstance(weight, torch.Tensor) for weight in loaded):
            return
        name, dtype = str(getattr(layer, "layer_name", "")), dtype_name(loaded[0])
        wanted = planned_format(activation)
        self.weights = wanted.convert(name, *loaded)
        if self.weights.w13 is not loaded[0]:
            replace_parameter(layer, "w13_weight", self.weights.w13)
            replace_parameter(layer, "w2_weight", self.weights.w2)
        entry = LayerProof(
            name=name,
            num_local_experts=loaded[0].shape[0],
            hidden_size=loaded[1].shape[1],
            intermediate_size=loaded[1].shape[2],
            dtype=dtype,
            expert_map=getattr(layer, "expert_map", None) is not None,
            weight_format=self.weights.format,
            weight_dtype="" if self.weights.format == PLAIN else dtype_name(self.weights.w13),
        )
        pass_names = (EXPERTS_PASS,) if self.weights.format == PLAIN else weight_format(self.weights.format).passes
        activation.add_layer(pass_names, layer.w13_weight.data_ptr(), entry)

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
        weights = self.weights
        run_experts(
            output,
            hidden_states,
            w1,
            w2,
            topk_weights.to(torch.float32),
            topk_ids,
            expert_map,
            None if weights is None else weights.w13_scale,
            None if weights is None else weights.w2_scale,
            self.w1_bias,
            self.w2_bias,
            PLAIN if weights is None else weights.format,
        )
