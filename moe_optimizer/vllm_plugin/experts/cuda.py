"""The experts class for unquantised layers on CUDA: our kernels where the plan's table has them, Triton elsewhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from moe_optimizer.ops import _load
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, STOCK, TokenRange, rounds_activations
from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts, QuantKeys
from moe_optimizer.vllm_plugin.experts.cuda_layer import ALIGNMENT, CudaLayer
from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer, Served
from moe_optimizer.vllm_plugin.experts.vllm_call import VllmCall
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, ExpertsCall, KernelWeights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_decision

_CAPABILITY = 90
_WEIGHTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CANARY_EXPERTS = 16
"""Chosen: a GPU computes the reference of so many experts in a few milliseconds a layer."""
_KEPT = "moe_optimizer_layer"
"""Attribute of a layer's w13 parameter, which vLLM keeps over updates of the weights."""
_NOT_FINISHED = "vLLM did not finish a forward as known: its output was not written, and it does not count as one"


class MoeOptimizerCudaExperts(MoeOptimizerExperts):
    """SwiGLU experts on a Hopper GPU.

    Python chooses the kernel of a forward by its number of tokens; for a CUDA graph, once, when it is captured. vLLM's
    own experts are kept beside ours, on the same weights.
    """

    dtypes = (torch.bfloat16,)
    has_biases: ClassVar[bool] = False
    """Whether layers may have biases; the kernels read them in FP32."""
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """FP32 [E, 2I] and [E, H]."""
    unnamed: ClassVar[Any] = itertools.count()
    """Numbers layers, in the order of their first forward, where vLLM does not say their names."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        (stock,) = self.stock_classes
        self.stock: Any = stock(moe_config, quant_config)
        self._layer: CudaLayer | None = None
        self._output = _Output(self.stock)
        self._name = ""

    @classmethod
    def kernel_name(cls) -> tuple[str, str]:
        """Return the kernel's name and instruction set for the proof."""
        return "fused_experts (cuda)", "sm_90a"

    @classmethod
    def why_not(cls, moe_config: Any, keys: QuantKeys, session: PluginSession) -> str:
        """Return why vLLM computes this layer alone, or ""."""
        available, reason = _load.kernels_available()
        if not available:
            return reason
        if not hasattr(_load.kernels(), "cuda_run"):
            return "built without CUDA kernels; `bash build.sh` says why"
        if moe_config.has_bias and not cls.has_biases:
            return "kernel does not support biases"
        if len(cls.stock_classes) != 1:
            return f"vLLM has {len(cls.stock_classes)} kernels for this layer, known is one"
        (stock,) = cls.stock_classes
        supported, reason = stock.is_supported_config(stock, moe_config, *keys, cls.activation_format())
        if not supported:
            return f"vLLM's own kernel, needed beside ours, does not support it: {reason}"
        decision = session.wanted(EXPERTS_PASS)
        assert decision is not None, "the class is offered when the plan wants it"
        kind = cls.weight_kind(moe_config, keys)
        planned = kind in decision.params_as(FlashDmoeParams).dispatch
        return "" if planned else f"the plan has no kernel of ours for {kind} weights"

    @classmethod
    def weight_kind(cls, moe_config: Any, keys: QuantKeys) -> str:  # noqa: ARG003 - unquantised here
        """Return the name of this layer's weights in the plan's dispatch."""
        return _WEIGHTS[moe_config.in_dtype]

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.is_device_capability(_CAPABILITY)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        # Under data parallelism vLLM gathers the tokens of all ranks before the experts and sums after them: to a
        # kernel they are tokens like any other, with global expert numbers. Other ways of exchanging them hand over
        # something else. EPLB copies weights into the rows that our kernels read in place.
        exchanges = getattr(moe_parallel_config, "use_all2all_kernels", False)
        return not exchanges or bool(getattr(moe_parallel_config, "use_ag_rs_all2all_kernels", False))

    @staticmethod
    def _supports_batch_invariance() -> bool:
        # Another number of tokens may be computed by another kernel.
        return False

    def workspace_shapes(self, *sizes: Any, **named: Any) -> Any:
        """As vLLM's own experts, whichever kernel runs: vLLM sizes its workspace once, from the largest forward, and a
        smaller one may be theirs.
        """
        return self.stock.workspace_shapes(*sizes, **named)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Return what writes the layer's output."""
        return self._output

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Note the layer's name; the weights stay as they are."""
        self._name = str(getattr(layer, "layer_name", ""))

    def compute(self, call: VllmCall) -> Any:
        """Compute the routed experts of every token: ours once vLLM names the output, vLLM's into `call.output`."""
        layer = self._layer_of(call)
        use = layer.use_for(call.hidden_states.shape[0])
        if use == STOCK or not layer.covers(call.hidden_states):
            quantized, scale = self.stock_input(call.hidden_states)
            done = self.stock.apply(*call._replace(hidden_states=quantized, a1q_scale=scale))
            layer.note_run(STOCK, call.hidden_states)
            return done
        ours = ExpertsCall(
            out=call.output,
            x=call.hidden_states,
            topk_weights=call.weights_to_apply,
            topk_ids=call.topk_ids,
            expert_map=call.expert_map,
            w13_bias=self.biases[0],
            w2_bias=self.biases[1],
        )
        if self._output.pending is not None and not self._output.left_out:
            self._output.left_out = True
            current_decision(EXPERTS_PASS)[0].refused(EXPERTS_PASS, _NOT_FINISHED)
        if self._output.left_out:
            _run_into(layer, use, ours, call.output)
        else:
            self._output.pending = functools.partial(_run_into, layer, use, ours)
        return None

    def computes(self, tokens: int) -> bool:
        """Return whether a kernel of ours computes a forward of so many tokens, as far as the layer is known yet."""
        return self._layer is not None and self._layer.use_for(tokens) != STOCK

    def unknown_call(self, named: dict[str, Any], why: str) -> Any:
        """Hand a call that is not as known to vLLM's own experts, whose interface is that of the same version."""
        current_decision(EXPERTS_PASS)[0].refused(EXPERTS_PASS, f"fallback: {why}")
        quantized, scale = self.stock_input(named["hidden_states"])
        return self.stock.apply(**named | {"hidden_states": quantized, "a1q_scale": scale})

    def stock_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the activations and their scale as vLLM's own experts expect them."""
        return x, None

    def kernel_weights(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[KernelWeights, str]:
        """Return the layer's weights for our kernels, and their name in the plan's dispatch."""
        return KernelWeights(format=PLAIN, w13=w1, w2=w2), _WEIGHTS[w1.dtype]

    def use_kernel(self, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None, name: str) -> None:
        """Run one kernel for any number of tokens, unchecked and outside any plan: for measurements."""
        weights, _ = self.kernel_weights(w1, w2)
        self._layer = CudaLayer(self._described(weights, expert_map), (TokenRange(up_to=ANY_NUMBER, use=name),))

    def weights_changed(self, layer: Any) -> None:
        """Bring up to date what the kernels keep beside the weights that vLLM has changed in place."""
        if self._layer is None:
            self._layer = getattr(layer.w13_weight, _KEPT, None)
        if self._layer is not None:
            self._layer.rewrite_scales(self.stored_weights(layer))

    def stored_weights(self, layer: Any) -> KernelWeights:
        """Return the weights of vLLM's layer as it holds them now."""
        return KernelWeights(format=PLAIN, w13=layer.w13_weight, w2=layer.w2_weight)

    def served(self, layer: Any, *, largest: int, position: int) -> Served | None:
        """Return what the canary tries: the planned kernels as the layer's own check takes them."""
        if self._layer is None:
            return None
        sizes = self._layer.sizes(largest, position=position)
        return Served(
            layer=self._layer.described(self.stored_weights(layer)),
            sizes=sizes,
            rounding=frozenset(name for name in sizes if rounds_activations(name)),
            num_experts=_CANARY_EXPERTS,
        )

    def _described(self, weights: KernelWeights, expert_map: torch.Tensor | None) -> ExpertsLayer:
        return ExpertsLayer(
            name=self._name or f"MoE layer {next(self.unnamed)}",
            weights=weights,
            dtype=self.moe_config.in_dtype,
            top_k=self.moe_config.experts_per_token,
            expert_map=expert_map,
            w13_bias=self.biases[0],
            w2_bias=self.biases[1],
        )

    def _layer_of(self, call: VllmCall) -> CudaLayer:
        """Return the layer, which is checked in its first forward: vLLM's own, to measure memory.

        It stays with the weights: after an update vLLM makes new experts over them, and captured graphs still read
        what this layer keeps.
        """
        address = call.w1.data_ptr()
        for known in (self._layer, getattr(call.w1, _KEPT, None)):
            if known is not None and known.address == address:
                self._layer = known
                return known
        session, decision = current_decision(EXPERTS_PASS)
        weights, kind = self.kernel_weights(call.w1, call.w2)
        ranges = decision.params_as(FlashDmoeParams).dispatch.get(kind, ())
        self._layer = CudaLayer(self._described(weights, call.expert_map), ranges)
        setattr(call.w1, _KEPT, self._layer)
        self._layer.check(session, tokens=call.hidden_states.shape[0])
        return self._layer


def _run_into(layer: CudaLayer, use: str, call: ExpertsCall, out: torch.Tensor) -> None:
    layer.run(use, call._replace(out=out))
    layer.note_run(use, call.x)


class _Output(mk.TopKWeightAndReduce):
    """Writes a layer's output.

    vLLM's experts write into its workspace, which is then copied into the layer's output. Our kernels are launched here
    instead, where vLLM names that output: one launch less per layer.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self.pending: Callable[[torch.Tensor], None] | None = None
        self.left_out = False
        """vLLM has not finished a forward with this object: the kernels then write where the experts are told to."""

    def apply(
        self, output: torch.Tensor | None, fused_expert_output: torch.Tensor, *arguments: Any, **named: Any
    ) -> torch.Tensor:
        """Run the pending kernel into the layer's output, or finish what vLLM's own experts computed."""
        run, self.pending = self.pending, None
        if run is None:
            theirs = self._stock.finalize_weight_and_reduce_impl()
            return theirs.apply(output, fused_expert_output, *arguments, **named)
        if output is None or not _is_like(output, fused_expert_output):
            run(fused_expert_output)
            return TopKWeightAndReduceNoOP().apply(output, fused_expert_output, *arguments, **named)
        run(output)
        return output


def _is_like(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether the kernels can write here what vLLM expects in its own buffer."""
    same = output.shape == expected.shape and output.dtype == expected.dtype
    return same and output.is_contiguous() and output.data_ptr() % ALIGNMENT == 0
