"""The experts class for vLLM's CPU build."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.ops import use_huge_pages
from moe_optimizer.proof.record import LayerProof
from moe_optimizer.vllm_plugin.experts import kernel
from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts, QuantKeys
from moe_optimizer.vllm_plugin.experts.op import dtype_name, run_experts
from moe_optimizer.vllm_plugin.experts.self_check import CheckedKernel, CheckResult, LayerUnderCheck, check_layer
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, planned_format, weight_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session

_CHECKED_TOKENS = 4
_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"


class MoeOptimizerCpuExperts(MoeOptimizerExperts):
    """SwiGLU experts in FP32, BF16 or FP16 on the CPU; the plan may want the weights in another format."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    weights: KernelWeights | None = None
    """Set once the layer is loaded."""
    _stock: Any = None
    """vLLM's own experts, for a layer that our kernel computes wrongly."""

    @classmethod
    def kernel_name(cls) -> tuple[str, str]:
        """Return the kernel's name and instruction set for the proof."""
        return f"{kernel.NAME} (cpu)", kernel.isa()

    @classmethod
    def why_not(cls, moe_config: Any, keys: QuantKeys, session: PluginSession) -> str:  # noqa: ARG003
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

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring the weights into the planned format and try the kernel on them; name the layer in the proof.

        A layer that the kernel computes wrongly is handed to vLLM's own class, with the reason in the proof.

        Raises:
            RequiredNotAppliedError: it is, and the plan requires the kernel or vLLM's own cannot compute the layer.
        """
        session = current_session()
        loaded = (layer.w13_weight, layer.w2_weight)
        if session is None or not all(isinstance(weight, torch.Tensor) for weight in loaded):
            return
        name = str(getattr(layer, "layer_name", ""))
        expert_map = getattr(layer, "expert_map", None)
        weights = planned_format(session).convert(name, *loaded)
        result = self._checked(name, weights, expert_map, loaded)
        if result.reason:
            for pass_name in _passes_of(weights):
                session.refused(pass_name, f"{name}: self-check failed: {result.reason}")
            self._hand_to_stock(layer, name, expert_map)
            return
        self.weights = weights
        if weights.w13 is not loaded[0]:
            replace_parameter(layer, "w13_weight", weights.w13)
            replace_parameter(layer, "w2_weight", weights.w2)
        entry = LayerProof(
            name=name,
            num_local_experts=loaded[0].shape[0],
            hidden_size=loaded[1].shape[1],
            intermediate_size=loaded[1].shape[2],
            dtype=dtype_name(loaded[0].dtype),
            expert_map=expert_map is not None,
            weight_format=weights.format,
            weight_dtype="" if weights.format == PLAIN else dtype_name(weights.w13.dtype),
            loaded_bytes=sum(weight.nbytes for weight in loaded),
            weight_bytes=weights.nbytes,
            why_small_pages=_why_small_pages(weights),
            output_error=weights.output_error,
            why_plain=weights.why_plain,
            self_check_error=result.error,
        )
        session.add_layer((*_passes_of(weights), *session.other_passes(layer)), layer.w13_weight.data_ptr(), entry)

    def _checked(
        self,
        name: str,
        weights: KernelWeights,
        expert_map: torch.Tensor | None,
        loaded: tuple[torch.Tensor, torch.Tensor],
    ) -> CheckResult:
        form = weight_format(weights.format)
        under_check = LayerUnderCheck(
            name=name,
            format=form,
            weights=weights,
            dtype=self.moe_config.in_dtype,
            hidden_size=loaded[1].shape[1],
            num_local_experts=loaded[0].shape[0],
            top_k=self.moe_config.experts_per_token,
            expert_map=expert_map,
            w13_bias=self.w1_bias,
            w2_bias=self.w2_bias,
        )
        tried = CheckedKernel(run=lambda call: form.compute(weights, call), tokens=_CHECKED_TOKENS)
        return check_layer(under_check, {kernel.NAME: tried})

    def _hand_to_stock(self, layer: torch.nn.Module, name: str, expert_map: torch.Tensor | None) -> None:
        if expert_map is not None:
            raise RequiredNotAppliedError(
                f"{EXPERTS_PASS}: {name}: our kernel is wrong here, and vLLM's own CPU kernel ignores the expert map"
            )
        for stock in self.stock_classes:
            if stock.is_supported_config(stock, self.moe_config, None, None, self.activation_format())[0]:
                self._stock = stock(self.moe_config, self.quant_config)
                self._stock.process_weights_after_loading(layer)
                return
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {name}: our kernel is wrong here, and vLLM has no other")

    def compute(self, call: VllmCall) -> None:
        """Compute the routed experts of every token into `call.output`."""
        if self._stock is not None:
            self._stock.apply(*call)
            return
        weights = self.weights
        run_experts(
            call.output,
            call.hidden_states,
            call.w1,
            call.w2,
            call.weights_to_apply.to(torch.float32),
            call.topk_ids,
            call.expert_map,
            None if weights is None else weights.w13_scale,
            None if weights is None else weights.w2_scale,
            None if weights is None else weights.w13_mask,
            None if weights is None else weights.w2_mask,
            self.w1_bias,
            self.w2_bias,
            PLAIN if weights is None else weights.format,
        )


def _why_small_pages(weights: KernelWeights) -> str:
    """Move the weights to huge pages, in place; return why some are not, or ""."""
    outcomes = {use_huge_pages(tensor) for tensor in (weights.w13, weights.w2)}
    return "; ".join(sorted(reason for done, reason in outcomes if not done))


def _passes_of(weights: KernelWeights) -> tuple[str, ...]:
    """Return the passes that a layer in this format counts for."""
    return weight_format(weights.format).passes
