"""Builds the arguments of the compiled module: C++ structs, each as a dictionary with exactly the struct's fields.

Addresses, sizes, strides and codes: nothing of torch crosses into the module. The tests hand the same dictionaries
to the CUDA kernels' emulation on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_optimizer.ops.cuda_variants import MoeSizes, Variant, variant_fields
from moe_optimizer.ops.expert_inputs import Inputs, bits_of, columns_of, holds_mxfp4

Fields = dict[str, int | float | bool]
"""A C++ struct by field names. A missing or unknown field is a TypeError."""

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_E2M1_PAIRS = 4
ACTIVATIONS = ("silu", "swigluoai")
SCORINGS = ("softmax", "sigmoid")
"""Positions are the codes of csrc/include/moeopt, as are the values of DTYPE_CODE."""
_NO_SCALE, _BLOCK_SCALE, _CHANNEL_SCALE, _GROUP_SCALE = 0, 1, 2, 3
_SKINNY_BF16, _SKINNY_ROWS, _SKINNY_BLOCKS = 0, 1, 2


class Router(NamedTuple):
    """How logits become expert ids and weights, in the order of the schema; meaning: `topk_router`."""

    logits: Tensor
    """[T, E], float32 or bfloat16; on CUDA contiguous. `gate_topk` writes them."""
    top_k: int
    score_bias: Tensor | None = None
    """float32 [E], contiguous: added for the choice only."""
    renormalize: bool = True
    scoring: str = "softmax"
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0

    def fields(self) -> Fields:
        """Return `RouterArgs`, which has 1 group where there are none."""
        groups = self.num_expert_group or 1
        return {
            "logits": self.logits.data_ptr(),
            "logits_are_bf16": self.logits.dtype == torch.bfloat16,
            "scoring": SCORINGS.index(self.scoring),
            "renormalize": self.renormalize,
            "num_groups": groups,
            "topk_groups": self.topk_group if groups > 1 and self.topk_group is not None else groups,
            "bias": _address(self.score_bias),
            "scaling_factor": self.routed_scaling_factor,
        }


class GateTopk(NamedTuple):
    """A call of `gate_topk`."""

    x: Tensor
    gate: Tensor
    router: Router
    topk_weights: Tensor
    topk_ids: Tensor
    is_padding: Tensor | None = None
    """bool [T], contiguous."""

    def call(self, arrived: int = 0) -> tuple[Fields, Fields]:
        """Return the arguments of `cuda_gate_layout` and the first of `cuda_gate_run`.

        Args:
            arrived: address of T E zeroed words of 32 bits, which are zero again after the call; not needed for a
                layout.
        """
        hidden = self.x.shape[1]
        fields: Fields = {
            "x": self.x.data_ptr(),
            "x_stride": self.x.stride(0) if self.x.shape[0] > 1 else hidden,
            "gate": self.gate.data_ptr(),
            "gate_stride": self.gate.stride(0) if self.gate.shape[0] > 1 else hidden,
            "is_padding": _address(self.is_padding),
            "topk_ids": self.topk_ids.data_ptr(),
            "topk_weights": self.topk_weights.data_ptr(),
            "num_tokens": self.x.shape[0],
            "hidden_size": hidden,
            "num_experts": self.gate.shape[0],
            "top_k": self.router.top_k,
            "arrived": arrived,
        }
        return fields, self.router.fields()


class SkinnyGemm(NamedTuple):
    """A call of `skinny_gemm`."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    out: Tensor
    scale: Tensor | None = None
    """Of an E4M3 weight; shapes: `skinny_gemm`."""

    def call(self, multiprocessors: int) -> tuple[Fields, int]:
        """Return the arguments of `cuda_skinny_layout` and the first of `cuda_skinny_run`."""
        tokens, depth = self.x.shape
        rows = self.w.shape[0]
        weights, row_stride, depth_stride = self._scales()
        fields: Fields = {
            "x": self.x.data_ptr(),
            "x_stride": self.x.stride(0) if tokens > 1 else depth,
            "w": self.w.data_ptr(),
            "bias": _address(self.bias),
            "out": self.out.data_ptr(),
            "out_stride": self.out.stride(0) if tokens > 1 else rows,
            "num_tokens": tokens,
            "depth": depth,
            "num_rows": rows,
            "scale": _address(self.scale),
            "scale_row_stride": row_stride,
            "scale_depth_stride": depth_stride,
            "weights": weights,
        }
        return fields, multiprocessors

    def _scales(self) -> tuple[int, int, int]:
        """Return `SkinnyWeights`, and the strides of the scales."""
        scale = self.scale
        if scale is None:
            return _SKINNY_BF16, 0, 0
        if scale.numel() == 1:
            return _SKINNY_ROWS, 0, 0
        if is_of_rows(self.w, scale):
            return _SKINNY_ROWS, scale.stride(0), 0
        return _SKINNY_BLOCKS, scale.stride(0), scale.stride(1)


def is_of_rows(w: Tensor, scale: Tensor) -> bool:
    """Return whether scales are one per row of a dense weight: [N] or [N, 1]; else they are of blocks."""
    return scale.dim() == 1 or (scale.shape[1] == 1 and scale.shape[0] == w.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaProblem:
    """The checked tensors of one call; small ones already contiguous, biases and scales already float32."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    out: Tensor
    topk_weights: Tensor | None = None
    topk_ids: Tensor | None = None
    router: Router | None = None
    expert_map: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    activation: str = "silu"
    w13_zero: Tensor | None = None
    """INT4 only: uint8 [E, 2I, H / group], 0 to 15, contiguous; None: 8 everywhere."""
    w2_zero: Tensor | None = None

    @property
    def int4(self) -> bool:
        """Whether uint8 weights are INT4 codes: their scales are BF16 [E, rows, K / group], those of MXFP4 bytes."""
        return holds_mxfp4(self.w13) and self.w13_scale is not None and self.w13_scale.is_floating_point()

    @property
    def top_k(self) -> int:
        """Slots per token."""
        if self.router is not None:
            return self.router.top_k
        assert self.topk_ids is not None
        return self.topk_ids.shape[1]

    @property
    def sizes(self) -> MoeSizes:
        """The sizes of the call."""
        return MoeSizes(
            num_tokens=self.x.shape[0],
            top_k=self.top_k,
            num_experts=self.w13.shape[0],
            hidden_size=self.x.shape[1],
            intermediate_size=columns_of(self.w2),
            weight_bits=bits_of(self.w13),
            int4=self.int4,
        )

    def call(
        self, variant: Variant, num_multiprocessors: int
    ) -> tuple[Fields, Fields | None, Fields | None, Fields, int]:
        """Return the first arguments of `cuda_layout` and `cuda_run`."""
        router = None if self.router is None else self.router.fields()
        experts, int4 = experts_fields(self, self.out), None
        if self.int4:
            int4 = self._int4_fields()
            # The struct has no place for INT4: its codes lie as those of MXFP4 do.
            experts |= {"scale_kind": _NO_SCALE, "w13_exponents": 0, "w2_exponents": 0}
        return experts, router, int4, variant_fields(variant, self.sizes), num_multiprocessors

    def _int4_fields(self) -> Fields:
        """Return `Int4Args` of csrc/launch/problem.h."""
        assert self.w13_scale is not None
        assert self.w2_scale is not None
        return {
            "w13_scale": self.w13_scale.data_ptr(),
            "w2_scale": self.w2_scale.data_ptr(),
            "w13_zero": _address(self.w13_zero),
            "w2_zero": _address(self.w2_zero),
            "w13_group": columns_of(self.w13) // max(1, self.w13_scale.shape[-1]),
            "w2_group": columns_of(self.w2) // max(1, self.w2_scale.shape[-1]),
        }


def experts_fields(tensors: Inputs | CudaProblem, out: Tensor) -> Fields:
    """Return `FusedExpertsArgs`. The addresses keep no tensor alive."""
    x, w13, w2, ids, scale = tensors.x, tensors.w13, tensors.w2, tensors.topk_ids, tensors.w13_scale
    packed = holds_mxfp4(w13)
    scales = _address(scale), _address(tensors.w2_scale)
    return {
        "num_tokens": x.shape[0],
        "hidden_size": x.shape[1],
        "intermediate_size": columns_of(w2),
        "num_local_experts": w13.shape[0],
        "num_global_experts": 0 if tensors.expert_map is None else tensors.expert_map.shape[0],
        "top_k": tensors.top_k,
        "x": x.data_ptr(),
        "x_stride": x.stride(0),
        "x_dtype": DTYPE_CODE[x.dtype],
        "out": out.data_ptr(),
        "out_stride": out.stride(0),
        "w13": w13.data_ptr(),
        "w13_expert_stride": w13.stride(0),
        "w13_row_stride": w13.stride(1),
        "w2": w2.data_ptr(),
        "w2_expert_stride": w2.stride(0),
        "w2_row_stride": w2.stride(1),
        "weight_dtype": _E2M1_PAIRS if packed else DTYPE_CODE[w13.dtype],
        "scale_kind": _scale_kind(w13, scale),
        "w13_scale": 0 if packed else scales[0],
        "w2_scale": 0 if packed else scales[1],
        "w13_exponents": scales[0] if packed else 0,
        "w2_exponents": scales[1] if packed else 0,
        "w13_bias": _address(tensors.w13_bias),
        "w2_bias": _address(tensors.w2_bias),
        "topk_weights": _address(tensors.topk_weights),
        "topk_ids": _address(ids),
        "ids_are_int64": ids is not None and ids.dtype == torch.int64,
        "expert_map": _address(tensors.expert_map),
        "activation": ACTIVATIONS.index(tensors.activation),
    }


def _scale_kind(weight: Tensor, scale: Tensor | None) -> int:
    if scale is None:
        return _NO_SCALE
    if holds_mxfp4(weight):
        return _GROUP_SCALE
    return _CHANNEL_SCALE if scale.dim() == 2 else _BLOCK_SCALE


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
