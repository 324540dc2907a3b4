"""The sides of the CUDA benchmark: our variants, and vLLM's kernels where vLLM can be imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from bench_cuda_cases import (
    Shape,
    Tokens,
    Weights,
    int4_values,
    is_int4,
    padded_gate_up_in_turn,
    padded_mxfp4,
    problem_of,
)

from moe_optimizer.ops import cuda_dispatch, reference
from moe_optimizer.ops.cuda_variants import DirectVariant, Variant, candidate_variants, choose_variant
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from moe_optimizer.specs.kernel_speeds import rounds_activations

Call = Callable[[], torch.Tensor]
"""Runs one call on the current stream and returns its output."""

Side = TypeVar("Side")

FAMILIES: tuple[str, ...] = (
    "direct",
    "grouped-bf16",
    "grouped-fp8_weights",
    "grouped-fp8",
    "direct-mxfp4",
    "grouped-mxfp4_weights",
    "grouped-mxfp4",
    "direct-int4",
    "grouped-int4_weights",
)


def family_of(variant: Variant, dtype: str) -> str:
    """The group of kernels a variant belongs to: what is excluded together when a check fails."""
    if isinstance(variant, DirectVariant):
        return "direct-int4" if is_int4(dtype) else "direct-mxfp4" if dtype == "mxfp4" else "direct"
    return f"grouped-{variant.mode.name.lower()}"


def variants_for(problem: CudaProblem) -> list[Variant]:
    """The variants worth timing for a call, the likeliest best first."""
    return list(candidate_variants(problem.sizes, rounded_mxfp4=True))


def our_call(problem: CudaProblem, variant: Variant) -> Call:
    """One of our variants."""

    def call() -> torch.Tensor:
        cuda_dispatch.run(problem, variant)
        return problem.out

    return call


def our_call_from_logits(weights: Weights, tokens: Tokens, shape: Shape) -> Call:
    """The chosen variant with the gate inside."""
    problem = replace(problem_of(weights, tokens), router=Router(logits=tokens.logits, top_k=shape.top_k),
                      topk_ids=None, topk_weights=None)  # fmt: skip
    return our_call(problem, choose_variant(problem.sizes))


class Vllm:
    """vLLM's own kernels: Triton fused_experts, BF16 or FP8 with 128 x 128 blocks, and its softmax top-k."""

    def __init__(self) -> None:
        from vllm import __version__
        from vllm.model_executor.layers.fused_moe import fused_moe
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

        self.version = __version__
        self._experts = fused_moe.fused_experts
        self._fp8_config = fp8_w8a8_moe_quant_config
        self._topk = _vllms_topk()

    def experts(self, weights: Weights, tokens: Tokens) -> Call:
        """`fused_experts` with given ids."""
        return lambda: self._run(weights, tokens, tokens.topk_weights, tokens.topk_ids)

    def layer(self, weights: Weights, tokens: Tokens, shape: Shape) -> Call:
        """Its gate, then `fused_experts`."""

        def call() -> torch.Tensor:
            topk_weights, topk_ids = self._topk(tokens.x, tokens.logits, shape.top_k, True)[:2]
            return self._run(weights, tokens, topk_weights, topk_ids)

        return call

    def _run(
        self, weights: Weights, tokens: Tokens, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        config = None
        if weights.w13_scale is not None and weights.w2_scale is not None:
            config = self._fp8_config(weights.w13_scale, weights.w2_scale, block_shape=[128, 128])
        return self._experts(
            hidden_states=tokens.x, w1=weights.w13, w2=weights.w2, topk_weights=topk_weights, topk_ids=topk_ids,
            quant_config=config, expert_map=tokens.expert_map,
            global_num_experts=-1 if tokens.expert_map is None else tokens.expert_map.numel(),
        )  # fmt: skip


def _vllms_topk() -> Any:
    """The softmax top-k of vLLM."""
    try:
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
    except ImportError:  # older: beside the experts
        from vllm.model_executor.layers.fused_moe import fused_moe

        fused_topk = fused_moe.fused_topk  # pyrefly: ignore[missing-attribute]
    return fused_topk


class Marlin:
    """vLLM's experts for MXFP4 and INT4 on Hopper: weights and scales in Marlin's order, BF16 products."""

    def __init__(self) -> None:
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.quantization.utils.marlin_utils import (
            marlin_moe_permute_scales,
            marlin_zero_points,
        )
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin
        from vllm.scalar_type import scalar_types

        self._ops, self._run, self._types = _custom_ops, fused_marlin_moe, scalar_types
        self._prepare = prepare_moe_mxfp4_layer_for_marlin
        self._permute_scales, self._zero_points = marlin_moe_permute_scales, marlin_zero_points

    def experts(self, weights: Weights, tokens: Tokens) -> Call:
        """With given ids. The weights are copied into its order when they are met first."""
        w13, w2, w13_scale, w2_scale, *zeros = self._prepared(weights)
        w13_zeros, w2_zeros = zeros if zeros else (None, None)
        types, integers = self._types, weights.w13_scale is not None and weights.w13_scale.is_floating_point()
        quant_type = types.uint4 if zeros else types.uint4b8 if integers else types.float4_e2m1f
        hidden = tokens.x.shape[1]
        x = tokens.x if zeros or integers else torch.nn.functional.pad(tokens.x, (0, -hidden % 256))  # `padded_mxfp4`
        out = torch.empty_like(x)

        def moe_sum(rows: torch.Tensor, to: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None) -> None:
            # As MarlinExperts.moe_sum.
            if expert_map is None:
                self._ops.moe_sum(rows, to)
            else:
                self._ops.moe_sum(rows, to, ids, expert_map)

        def call() -> torch.Tensor:
            self._run(
                x, w13, w2, None, None, w13_scale, w2_scale, tokens.topk_weights, tokens.topk_ids, quant_type.id,
                global_num_experts=-1 if tokens.expert_map is None else tokens.expert_map.numel(),
                expert_map=tokens.expert_map, moe_sum=moe_sum, output=out, w1_zeros=w13_zeros, w2_zeros=w2_zeros,
            )  # fmt: skip
            return out[:, :hidden]

        return call

    def _prepared(self, weights: Weights) -> tuple[torch.Tensor, ...]:
        found = getattr(weights, "_marlin", None)
        if found is None:
            assert weights.w13_scale is not None
            assert weights.w2_scale is not None
            if weights.w13_scale.is_floating_point():
                found = self._prepared_int4(weights)
            else:
                layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
                found = self._prepare(layer, *padded_mxfp4(weights), None, None)[:4]
            object.__setattr__(weights, "_marlin", found)  # lives as long as the weights
        return found

    def _prepared_int4(self, weights: Weights) -> tuple[torch.Tensor, ...]:
        """As vLLM prepares GPTQ's experts: codes with 8 of K in a word, scales and zero points by group and row."""
        codes, scales, zeros = [], [], []
        for weight, scale, zero in (
            (weights.w13, weights.w13_scale, weights.w13_zero),
            (weights.w2, weights.w2_scale, weights.w2_zero),
        ):
            assert scale is not None
            rows, columns, groups = weight.shape[1], 2 * weight.shape[2], scale.shape[2]
            words = weight.view(torch.int32).transpose(1, 2).contiguous()
            codes.append(self._repacked(words, columns, rows))
            by_group = scale.transpose(1, 2).contiguous()
            scales.append(self._permute_scales(by_group, columns, rows, columns // groups))
            if zero is not None:
                of_all = zero.transpose(1, 2).reshape(-1, rows)
                packed = self._zero_points(of_all, of_all.shape[0], rows, 4)
                zeros.append(packed.view(zero.shape[0], groups, -1).contiguous())
        return (*codes, *scales, *zeros)

    def _repacked(self, words: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        repack: Any = self._ops.gptq_marlin_moe_repack
        if "perm" not in inspect.signature(repack).parameters:
            return repack(words, columns, rows, 4)
        in_order = torch.empty(words.shape[0], 0, dtype=torch.int32, device=words.device)  # vLLM 0.26 asks for it
        return repack(words, in_order, columns, rows, 4)


class TritonKernels:
    """What vLLM gives gpt-oss's MXFP4 experts to: the package triton_kernels, which it brings along.

    On one GPU, and with slices, it gets the router's logits: the choice of experts is in it, which others need before
    (`choice`). It computes gpt-oss's activation alone, with gate and up rows in turn.
    """

    activation = "swigluoai"

    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import triton_kernel_moe_forward
        from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4
        from vllm.utils.import_utils import has_triton_kernels

        if not has_triton_kernels():
            raise RuntimeError("vLLM finds no package triton_kernels")
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

        self._run, self._topk = triton_kernel_moe_forward, _vllms_topk()
        self._config, self._swizzle = mxfp4_w4a16_moe_quant_config, _swizzle_mxfp4
        self._precision, self._flex = PrecisionConfig, FlexCtx

    def experts(self, weights: Weights, tokens: Tokens) -> Call:
        """From logits on, all of experts that are here. Weights are copied into its order when they are met first."""
        w13, w2, config = self._prepared(weights)
        logits, top_k = _logits_of_choice(tokens, weights.w13.shape[0]), tokens.topk_ids.shape[1]
        return lambda: self._run(
            tokens.x, w13, w2, logits, top_k, True, quant_config=config, global_num_experts=logits.shape[1]
        )

    def choice(self, weights: Weights, tokens: Tokens) -> Call:
        """The choice of experts that vLLM makes for kernels that need it made."""
        logits, top_k = _logits_of_choice(tokens, weights.w13.shape[0]), tokens.topk_ids.shape[1]
        return lambda: self._topk(tokens.x, logits, top_k, True)[0]

    def _prepared(self, weights: Weights) -> tuple[Any, Any, Any]:
        """As vLLM's `convert_to_mxfp4_moe_kernel_format` has them."""
        found = getattr(weights, "_triton_kernels", None)
        if found is None:
            w13, w2, w13_scale, w2_scale = padded_gate_up_in_turn(weights)
            codes, scales = [], []
            for weight, scale in ((w13, w13_scale), (w2, w2_scale)):
                swizzled, flex, of_groups = self._swizzle(weight, scale)
                codes.append(swizzled)
                scales.append(self._precision(weight_scale=of_groups, flex_ctx=self._flex(rhs_data=flex)))
            found = (*codes, self._config(*scales))
            object.__setattr__(weights, "_triton_kernels", found)  # lives as long as the weights
        return found


def _logits_of_choice(tokens: Tokens, experts: int) -> torch.Tensor:
    """BF16 logits, as a router gives them, whose softmax over the chosen experts is their weights."""
    logits = torch.full((len(tokens.x), experts), -1e4, dtype=torch.bfloat16, device="cuda")
    return logits.scatter_(1, tokens.topk_ids.long(), tokens.topk_weights.log().bfloat16())


class DeepGemm:
    """DeepGEMM's FP8 grouped GEMMs as vLLM runs them: tokens quantised and sorted, both products, sum by token."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
        from vllm.utils.deep_gemm import is_deep_gemm_supported

        if not is_deep_gemm_supported():
            raise RuntimeError("vLLM says that DeepGEMM does not run here")
        self._class, self._config, self._quantize = (
            DeepGemmExperts,
            fp8_w8a8_moe_quant_config,
            per_token_group_quant_fp8,
        )
        self._silu = MoEActivation.SILU

    def experts(self, weights: Weights, tokens: Tokens) -> Call:
        """With given ids; its workspaces are allocated once."""
        assert weights.w13_scale is not None
        assert weights.w2_scale is not None
        config = self._config(weights.w13_scale, weights.w2_scale, block_shape=[128, 128])
        # The layer's configuration is kept by the class and read only where experts are spread over GPUs.
        layer_config: Any = SimpleNamespace()
        experts = self._class(layer_config, config)
        local, rows, hidden = weights.w13.shape
        total = local if tokens.expert_map is None else tokens.expert_map.numel()
        sizes = (tokens.x.shape[0], rows, hidden, tokens.topk_ids.shape[1], total, local, None, self._silu)
        first, second, out = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in experts.workspace_shapes(*sizes)
        )

        def call() -> torch.Tensor:
            quantized, scale = self._quantize(tokens.x, 128)
            experts.apply(
                out, quantized, weights.w13, weights.w2, tokens.topk_weights, tokens.topk_ids, self._silu, total,
                tokens.expert_map, scale, None, first, second, None, False,
            )  # fmt: skip
            return out

        return call


def find_vllm() -> tuple[Vllm | None, str]:
    """Return the side of vLLM, or why there is none."""
    return _find(Vllm)


def find_marlin() -> tuple[Marlin | None, str]:
    """Return the side of Marlin, or why there is none."""
    return _find(Marlin)


def find_triton_kernels() -> tuple[TritonKernels | None, str]:
    """Return the side of triton_kernels, or why there is none."""
    return _find(TritonKernels)


def find_deep_gemm() -> tuple[DeepGemm | None, str]:
    """Return the side of DeepGEMM, or why there is none."""
    return _find(DeepGemm)


def _find(side: type[Side]) -> tuple[Side | None, str]:
    try:
        return side(), ""
    except Exception as error:  # noqa: BLE001  anything may be missing in a foreign installation; it is printed
        return None, f"{type(error).__name__}: {error}"


def errors(problem: CudaProblem, out: torch.Tensor) -> tuple[float, float]:
    """Relative error of `out` and of torch in BF16, both against FP32 on the same (dequantised) weights."""
    assert problem.topk_weights is not None
    assert problem.topk_ids is not None
    w13, w2, w13_scale, w2_scale = problem.w13, problem.w2, problem.w13_scale, problem.w2_scale
    if problem.int4:
        assert w13_scale is not None
        assert w2_scale is not None
        w13, w13_scale = int4_values(w13, w13_scale, problem.w13_zero), None
        w2, w2_scale = int4_values(w2, w2_scale, problem.w2_zero), None
    arguments = (problem.x, w13, w2, problem.topk_weights, problem.topk_ids)
    options = {
        "w13_scale": w13_scale, "w2_scale": w2_scale, "w13_bias": problem.w13_bias,
        "w2_bias": problem.w2_bias, "expert_map": problem.expert_map, "activation": problem.activation,
    }  # fmt: skip
    want = reference.fused_experts(*arguments, **options).float()
    in_bf16 = reference.fused_experts(*arguments, **options, compute_dtype=torch.bfloat16).float()
    norm = want.norm()
    return float((out.float() - want).norm() / norm), float((in_bf16 - want).norm() / norm)


def error_bound(variant: Variant, torch_error: float) -> float:
    """Twice torch's error in BF16; E4M3 activations have 4 significant bits, in two places."""
    if rounds_activations(str(variant)):
        return 0.06
    return 2 * torch_error + 1e-3
