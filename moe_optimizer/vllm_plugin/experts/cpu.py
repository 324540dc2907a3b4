"""The experts class for vLLM's CPU build."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from vllm.platforms import current_platform

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.ops import use_huge_pages
from moe_optimizer.vllm_plugin.experts import kernel
from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts, QuantKeys
from moe_optimizer.vllm_plugin.experts.converted_layer import convert_when_loaded_again, put_weights
from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer, Served
from moe_optimizer.vllm_plugin.experts.op import run_experts
from moe_optimizer.vllm_plugin.experts.self_check import NUM_EXPERTS, CheckedKernel, check_layer
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, planned_format, weight_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session

_CHECKED_TOKENS = (1, 4, 64)
CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"


class MoeOptimizerCpuExperts(MoeOptimizerExperts):
    """SwiGLU experts in FP32, BF16 or FP16 on the CPU; the plan may want the weights in another format."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    weights = KernelWeights(format=PLAIN, w13=torch.empty(0, device="cpu"), w2=torch.empty(0, device="cpu"))
    """The layer's, once it is loaded; until then it computes with what vLLM hands over."""
    _stock: Any = None
    """vLLM's own experts, for a layer that our kernel computes wrongly."""

    @classmethod
    def kernel_name(cls) -> tuple[str, str]:
        """Return the kernel's name and instruction set for the proof."""
        return f"{kernel.NAME} (cpu)", kernel.isa()

    @classmethod
    def why_not(cls, moe_config: Any, keys: QuantKeys, session: PluginSession) -> str:  # noqa: ARG003
        """Return why the kernel cannot compute this layer here, or "" after it has computed a small one."""
        if importlib.util.find_spec(CPU_ROUTER) is None:
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

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the weights to the planned format, check the kernel on them, and enter the layer in the proof.

        vLLM's own class gets a layer that the kernel computes wrongly, with the reason in the proof.

        Raises:
            RequiredNotAppliedError: the kernel is wrong, and the plan requires it or vLLM has no other for the layer.
        """
        session = current_session()
        loaded = (layer.w13_weight, layer.w2_weight)
        if session is None or not all(isinstance(weight, torch.Tensor) for weight in loaded):
            return
        weights = planned_format(session).convert(str(getattr(layer, "layer_name", "")), *loaded)
        self.serve(session, layer, weights, loaded_bytes=sum(weight.nbytes for weight in loaded))

    def serve(self, session: PluginSession, layer: Any, weights: KernelWeights, *, loaded_bytes: int) -> None:
        """Check the kernel on a layer's weights, and enter the layer in the proof; a wrong one leaves it to vLLM.

        Raises:
            RequiredNotAppliedError: the kernel is wrong, and the plan requires it or vLLM has no other for the layer.
        """
        name = str(getattr(layer, "layer_name", ""))
        ours = self._described(name, weights, layer)
        form = ours.format
        kernels = {kernel.NAME: CheckedKernel(run=functools.partial(form.compute, weights), tokens=_CHECKED_TOKENS)}
        result = check_layer(ours, kernels)
        if result.reason:
            for pass_name in form.passes:
                session.refused(pass_name, f"{name}: self-check failed: {result.reason}")
            self._hand_to_stock(layer, name, ours.expert_map, result.reason)
            return
        self.weights = weights
        self.keep(layer, weights)
        entry = ours.proof(
            loaded_bytes=loaded_bytes,
            weight_bytes=weights.nbytes,
            why_small_pages=_why_small_pages(weights),
            output_error=weights.output_error,
            saturated=weights.saturated,
            why_plain=weights.why_plain,
            self_check_error=result.error,
        )
        session.add_layer((*form.passes, *session.other_passes(layer)), layer.w13_weight.data_ptr(), entry)

    def keep(self, layer: Any, weights: KernelWeights) -> None:
        """Make converted weights the layer's own, now and when it is loaded again."""
        if weights.format != PLAIN:
            put_weights(layer, weights)
            convert_when_loaded_again(layer, weights, self._converted_again)

    def _described(self, name: str, weights: KernelWeights, layer: Any) -> ExpertsLayer:
        return ExpertsLayer(
            name=name,
            weights=weights,
            dtype=self.moe_config.in_dtype,
            top_k=self.moe_config.experts_per_token,
            expert_map=getattr(layer, "expert_map", None),
            w13_bias=self.w1_bias,
            w2_bias=self.w2_bias,
        )

    def _converted_again(self, layer: Any) -> KernelWeights:
        """Return new weights of a loaded layer in the format that the kernel of its compiled graph reads."""
        session = current_session()
        name = str(getattr(layer, "layer_name", ""))
        again = weight_format(self.weights.format).convert_again(name, layer.w13_weight, layer.w2_weight)
        if session is not None:
            layer_proof = session.layer_at(self.weights.w13.data_ptr())
            layer_proof.output_error, layer_proof.saturated = again.output_error, again.saturated
            session.writer.touch()
        return again

    def _hand_to_stock(self, layer: torch.nn.Module, name: str, expert_map: torch.Tensor | None, reason: str) -> None:
        if expert_map is not None:
            raise RequiredNotAppliedError(
                f"{EXPERTS_PASS}: {name}: our kernel is wrong here ({reason}), and vLLM's own CPU kernel ignores "
                "the expert map"
            )
        for stock in self.stock_classes:
            if stock.is_supported_config(stock, self.moe_config, None, None, self.activation_format())[0]:
                self._stock = stock(self.moe_config, self.quant_config)
                self._stock.process_weights_after_loading(layer)
                return
        raise RequiredNotAppliedError(
            f"{EXPERTS_PASS}: {name}: our kernel is wrong here ({reason}), and vLLM has no other"
        )

    def served(self, layer: Any, *, largest: int, position: int) -> Served | None:
        """Return what the canary tries; the largest forward once for each shape, as it costs what a prompt costs."""
        if self._stock is not None or not self.weights.w13.numel():
            return None
        held = {name: getattr(layer, name) for name in self.weights.parameters}
        sizes = tuple(dict.fromkeys(min(tokens, largest) for tokens in (*_CHECKED_TOKENS, 1 if position else largest)))
        return Served(
            layer=self._described(str(getattr(layer, "layer_name", "")), self.weights.with_parameters(held), layer),
            sizes={kernel.NAME: sizes},
            num_experts=NUM_EXPERTS,
        )

    def unknown_call(self, named: dict[str, Any], why: str) -> Any:  # noqa: ARG002 - nobody else can compute it
        """Refuse: there are no experts of vLLM's on these weights.

        Raises:
            RequiredNotAppliedError: always.
        """
        raise RequiredNotAppliedError(f"{EXPERTS_PASS}: {why}", hint="serve with --disable-flash-dmoe")

    def compute(self, call: VllmCall) -> None:
        """Compute the routed experts of every token into `call.output`."""
        if self._stock is not None:
            self._stock.apply(*call)
            return
        weights, factors = self.weights, call.weights_to_apply
        run_experts(
            call.output,
            call.hidden_states,
            call.w1,
            call.w2,
            # Torch takes a microsecond to find that there is nothing to convert.
            factors if factors.dtype == torch.float32 else factors.to(torch.float32),
            call.topk_ids,
            call.expert_map,
            weights.w13_scale,
            weights.w2_scale,
            weights.w13_mask,
            weights.w2_mask,
            weights.w13_zero,
            weights.w2_zero,
            self.w1_bias,
            self.w2_bias,
            weights.format,
        )


def _why_small_pages(weights: KernelWeights) -> str:
    """Move the weights to huge pages, in place; return why some are not, or ""."""
    outcomes = {use_huge_pages(tensor) for tensor in (weights.w13, weights.w2)}
    return "; ".join(sorted(reason for done, reason in outcomes if not done))
