"""Builds one MoE layer with random weights, and runs it as a server would, with vLLM's own experts or with ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from moe_optimizer.measure.kernel_speeds.schedule import LARGEST_SIZE
from moe_optimizer.ops.reference import SCALE_BLOCK
from moe_optimizer.specs.kernel_speeds import LayerShape, SpeedQuestion

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANT_KEYS: dict[str, tuple[Any, Any]] = {
    "fp8_block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "fp8_channel": (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "fp8_tensor": (kFp8StaticTensorSym, kFp8DynamicTensorSym),
}
"""How the weights are stored -> what vLLM calls the quantisation of weights and activations; others have none."""
_CPU_BYTES = 512 << 20
"""Chosen: largest copy of the experts on a CPU, of which there are two; a larger layer gets fewer experts."""
_CPU_SPARE_EXPERTS = 4


def _ask_for_amx() -> None:
    """Have torch multiply in BF16: where the processor has AMX, it first asks the system to let this process use it.

    vLLM's expert kernel uses it without asking, because in a worker other layers have come before. The system ends a
    process that did not ask.
    """
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    ones.mm(ones)


class MeasuredLayer:
    """The weights of one layer, and functions that run it.

    Args:
        question: the layer.
        seed: of the weights; several layers of one question take turns, so that caches stay cold.
    """

    def __init__(self, question: SpeedQuestion, *, device: str, seed: int) -> None:
        if device == "cpu":
            _ask_for_amx()
        self.shape = question.shape if device == "cuda" else fewer_experts(question)
        self.device = device
        self.dtype = DTYPES.get(question.weights, torch.bfloat16)
        self.quant_keys = QUANT_KEYS.get(question.weights, (None, None))
        generator = torch.Generator(device=device).manual_seed(seed)
        experts, width, hidden = self.shape.num_experts, self.shape.intermediate_size, self.shape.hidden_size
        self.w13 = self._normal(generator, experts, 2 * width, hidden)
        self.w2 = self._normal(generator, experts, hidden, width)
        self.quant_config: Any = FusedMoEQuantConfig.make()
        self.scales: tuple[torch.Tensor, ...] = ()
        if question.weights in QUANT_KEYS:
            self._to_fp8(question.weights)
        self.expert_map = _expert_map(self.shape, device)
        self.moe_config = FusedMoEConfig(
            num_experts=self.shape.num_global_experts,
            experts_per_token=self.shape.top_k,
            hidden_dim=hidden,
            intermediate_size=width,
            num_local_experts=experts,
            num_logical_experts=self.shape.num_global_experts,
            activation=MoEActivation.SILU,
            device=device,
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=_split(self.shape),
            in_dtype=self.dtype,
            # Of a step: some of vLLM's kernels hold buffers for as many.
            max_num_tokens=LARGEST_SIZE,
        )

    def synchronize(self) -> None:
        """Wait for what was called.

        Raises:
            Exception: torch's, where a kernel failed.
        """
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _normal(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        values = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return values.normal_(0, shape[-1] ** -0.5, generator=generator)

    def _to_fp8(self, kind: str) -> None:
        """Round the weights to E4M3 with scales of one: times do not depend on their values."""
        scales = []
        for weight in (self.w13, self.w2):
            experts, rows, columns = weight.shape
            blocks = (experts, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
            size = {"fp8_block": blocks, "fp8_channel": (experts, rows, 1), "fp8_tensor": (experts,)}[kind]
            scales.append(torch.ones(size, dtype=torch.float32, device=self.device))
        self.w13, self.w2 = (weight.to(torch.float8_e4m3fn) for weight in (self.w13, self.w2))
        self.scales = w13_scale, w2_scale = tuple(scales)
        self.quant_config = fp8_w8a8_moe_quant_config(w13_scale, w2_scale, **self.quantisation)

    @property
    def quantisation(self) -> dict[str, Any]:
        """What shares a scale, as vLLM's configurations of FP8 experts have it."""
        channel = self.quant_keys[0] == kFp8StaticChannelSym
        return {
            "block_shape": [SCALE_BLOCK, SCALE_BLOCK] if self.quant_keys[0] == kFp8Static128BlockSym else None,
            "per_act_token_quant": channel,
            "per_out_ch_quant": channel,
        }

    def inputs(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random activations, routing weights and ids; all experts are equally likely."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        x = torch.randn(tokens, self.shape.hidden_size, device=self.device, generator=generator).to(self.dtype)
        scores = torch.rand(tokens, self.shape.num_global_experts, device=self.device, generator=generator)
        weights, ids = scores.softmax(-1).topk(self.shape.top_k)
        return x, weights, ids.int()

    def runner(self, experts: Any) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], Any]]:
        """Return what makes a call of the layer with these experts, for what `inputs` returns."""
        kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
        # Some of vLLM's kernels read a copy of the weights in an order of their own.
        w13, w2 = getattr(experts, "packed", (self.w13, self.w2))

        def make_call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Callable[[], Any]:
            return lambda: kernel.apply(
                x,
                w13,
                w2,
                weights,
                ids,
                MoEActivation.SILU,
                self.shape.num_global_experts,
                self.expert_map,
                apply_router_weight_on_input=False,
            )

        return make_call


def fewer_experts(question: SpeedQuestion) -> LayerShape:
    """Return the layer with as many experts as a measurement on a CPU may hold, which are more than its caches hold."""
    shape = question.shape
    each = 3 * shape.hidden_size * shape.intermediate_size * DTYPES[question.weights].itemsize
    most = max(_CPU_BYTES // each, _CPU_SPARE_EXPERTS * shape.top_k)
    experts = min(shape.num_experts, most)
    return LayerShape(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=experts,
        num_global_experts=experts,
        top_k=min(shape.top_k, experts),
    )


def _split(shape: LayerShape) -> FusedMoEParallelConfig:
    """Return how the ranks share the layer: vLLM chooses another backend where each holds whole experts."""
    alone = FusedMoEParallelConfig.make_no_parallel()
    ranks = -(-shape.num_global_experts // shape.num_experts)
    return dataclasses.replace(alone, ep_size=ranks, use_ep=True) if ranks > 1 else alone


def _expert_map(shape: LayerShape, device: str) -> torch.Tensor | None:
    """Return the map of a rank that holds the first experts; None when it holds all."""
    if shape.num_global_experts == shape.num_experts:
        return None
    ids = torch.arange(shape.num_global_experts, dtype=torch.int32, device=device)
    return torch.where(ids < shape.num_experts, ids, -1)
