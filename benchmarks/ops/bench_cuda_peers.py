"""The MoE kernels of libraries that need not live beside vLLM, each called as its own tests and benchmarks call it.

| peer | weights | what is not in its time |
|---|---|---|
| flashinfer_cutlass | BF16, FP8 by block, MXFP4 | nothing: one call, from ids to the sum by token |
| flashinfer_cutedsl | BF16 | the sort: its own needs headers that are fetched when it compiles |
| humming | FP8 by block, MXFP4, INT4 | the sort: the library has none |
| sgl_deep_gemm | BF16, FP8 by block | the same |
| quack | BF16 | the same |

So where a sort is left out, a peer's time is less than what a server would see. Weights are brought into a library's
order once. These libraries are imported here only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from bench_cuda_cases import PEER_FORMATS, Shape, Tokens, Weights, kind_of
from bench_cuda_pair_kernels import GROUP, ScaledRows, combine, quantize_silu_and_mul, quantize_tokens, silu_and_mul
from bench_cuda_pairs import pair_order
from bench_cuda_sides import Call
from bench_cuda_timing import capture

Sides = dict[str, list[Call]]
"""By name: a call per weight set."""

PEER_ERROR = {"bf16": 0.02, "fp8": 0.06, "mxfp4": 0.03, "int4": 0.03}
"""Largest error over the norm at which a peer's output is taken for right. Chosen: sums by token in BF16 may lose 0.01,
E4M3 tokens 0.047 (docs/kernels.md); a wrong order of weights, scales or halves is off by about 1."""


@dataclass(frozen=True)
class PeerCase:
    """One layer, format and number of tokens: a weight set and the tokens for it, several times."""

    shape: Shape
    dtype: str
    weights: list[Weights]
    inputs: list[Tokens]

    def each(self, make: Callable[[Weights, Tokens], Call]) -> list[Call]:
        """A call per weight set."""
        return [make(weights, tokens) for weights, tokens in zip(self.weights, self.inputs, strict=True)]


class NotOfferedError(Exception):
    """The peer has no kernel for this case; the text says what is missing."""


class Peer:
    """A library: imported and prepared when it is made, asked for its sides case by case."""

    distribution = ""

    def sides(self, case: PeerCase) -> Sides:
        """Return its calls for a case of a format that it has; NotOfferedError where sizes exclude it."""
        raise NotImplementedError

    def prepared(self, weights: Weights, make: Callable[[Weights], Any]) -> Any:
        """Weights in the library's order, made when they are met first; they live as long as the weights."""
        found = getattr(weights, "_peer", None)
        if found is None:
            found = make(weights)
            object.__setattr__(weights, "_peer", found)
        return found


def _up_first(weight: torch.Tensor) -> torch.Tensor:
    gate, up = weight.chunk(2, dim=1)
    return torch.cat((up, gate), dim=1).contiguous()


class FlashInferCutlass(Peer):
    """`cutlass_fused_moe`, tuned once for all numbers of tokens by FlashInfer's own autotuner."""

    distribution = "flashinfer-python"

    def __init__(self) -> None:
        from flashinfer.autotuner import autotune
        from flashinfer.fused_moe import (
            cutlass_fused_moe,
            interleave_moe_scales_for_sm90_mixed_gemm,
            interleave_moe_weights_for_sm90_mixed_gemm,
        )

        self._run, self._autotune = cutlass_fused_moe, autotune
        self._interleave_weights = interleave_moe_weights_for_sm90_mixed_gemm
        self._interleave_scales = interleave_moe_scales_for_sm90_mixed_gemm

    def sides(self, case: PeerCase) -> Sides:
        """One side."""
        calls = case.each(lambda weights, tokens: self._call(kind_of(case.dtype), weights, tokens))
        with self._autotune(True):
            calls[0]()
        torch.cuda.synchronize()
        return {"flashinfer_cutlass": calls}

    def _call(self, dtype: str, weights: Weights, tokens: Tokens) -> Call:
        w13, w2, scales = self.prepared(weights, lambda w: self._order(dtype, w))
        out = torch.empty_like(tokens.x)
        flags = {"fp8": {"use_deepseek_fp8_block_scale": True}, "mxfp4": {"use_w4_group_scaling": True}}.get(dtype, {})

        def call() -> torch.Tensor:
            self._run(
                input=tokens.x, token_selected_experts=tokens.topk_ids, token_final_scales=tokens.topk_weights,
                fc1_expert_weights=w13, fc2_expert_weights=w2, output_dtype=torch.bfloat16, quant_scales=scales,
                output=out, **flags,
            )  # fmt: skip
            return out

        return call

    def _order(self, dtype: str, weights: Weights) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Up before gate, as FlashInfer has them; 4-bit codes and scales interleaved for its mixed GEMM."""
        w13 = _up_first(weights.w13)
        if weights.w13_scale is None or weights.w2_scale is None:
            return w13, weights.w2, []
        w13_scale, w2_scale = _up_first(weights.w13_scale), weights.w2_scale
        if dtype == "fp8":
            if weights.w13.shape[1] // 2 % 128:
                raise NotOfferedError("the halves of w13 do not end where a block of 128 rows does")
            return w13, weights.w2, [w13_scale, w2_scale]
        codes = [self._interleave_weights(w, "fp4") for w in (w13, weights.w2)]
        return *codes, [self._interleave_scales(s) for s in (w13_scale, w2_scale)]


class FlashInferCuteDsl(Peer):
    """The two kernels of `cute_dsl_fused_moe_bf16`, each of its tilings that is listed here as a side of its own."""

    distribution = "flashinfer-python"
    tilings = ((64, 64, 64), (64, 128, 128), (128, 64, 64), (128, 128, 128), (128, 256, 256))
    """Rows, columns of gate+up, columns of down; (128, 64, 64) is what FlashInfer takes where it did not tune."""

    def __init__(self) -> None:
        from flashinfer.fused_moe.cute_dsl.sm90_contiguous_gather_grouped_gemm_act_fusion import (
            interleave_up_gate_sm90,
            sm90_contiguous_gather_grouped_gemm_act_fusion,
        )
        from flashinfer.fused_moe.cute_dsl.sm90_contiguous_grouped_gemm_finalize_fusion import (
            sm90_contiguous_grouped_gemm_finalize_fusion,
        )

        self._first = sm90_contiguous_gather_grouped_gemm_act_fusion
        self._second = sm90_contiguous_grouped_gemm_finalize_fusion
        self._interleave = interleave_up_gate_sm90

    def sides(self, case: PeerCase) -> Sides:
        """A side per tiling."""
        return {
            f"flashinfer_cutedsl {'x'.join(map(str, tiling))}": case.each(partial(self._call, case.shape, tiling))
            for tiling in self.tilings
        }

    def _call(self, shape: Shape, tiling: tuple[int, int, int], weights: Weights, tokens: Tokens) -> Call:
        w13 = self.prepared(weights, lambda w: self._interleave(w.w13).contiguous())
        rows, first_columns, second_columns = tiling
        order = pair_order(tokens.topk_ids, shape.experts)
        pairs, experts, _ = order.blocks(rows)
        starts = order.aligned_offsets(rows)
        blocks = torch.repeat_interleave(starts[:-1] + order.counts, starts.diff() // rows)
        limit = torch.minimum(torch.arange(1, experts.numel() + 1, device=pairs.device) * rows, blocks).int()
        live = torch.tensor([experts.numel()], dtype=torch.int32, device=pairs.device)
        length = pairs.numel()
        hidden = torch.empty(length, shape.width, dtype=torch.bfloat16, device=pairs.device)
        out = torch.empty_like(tokens.x)

        def call() -> torch.Tensor:
            out.zero_()
            self._first(
                tokens.x, w13, experts, limit, pairs, live, out=hidden, topk=shape.top_k, permuted_m=length,
                tile_shape_mn=(rows, first_columns), cluster_shape_mn=(1, 1),
            )  # fmt: skip
            self._second(
                hidden, weights.w2, experts, limit, pairs, live, tokens.topk_weights, out, topk=shape.top_k,
                tile_shape_mn=(rows, second_columns), cluster_shape_mn=(1, 1),
            )  # fmt: skip
            return out

        return call


class Humming(Peer):
    """Humming's indexed GEMMs, with BF16 tokens and, for FP8 weights, with tokens in E4M3 by groups of 128 too."""

    distribution = "humming-kernels"
    silu: ClassVar = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}
    fp8_tokens: ClassVar = {
        "dtype": "float8e4m3", "group_size": GROUP, "scale_dtype": "float32", "quant_mode": "dynamic_group",
    }  # fmt: skip

    def __init__(self) -> None:
        from humming.forward import may_process_input
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        self._class, self._process, self._heuristics = HummingLayer, may_process_input, get_heuristics_config

    def sides(self, case: PeerCase) -> Sides:
        """One side, two for FP8."""
        sides = {"humming": case.each(partial(self._call, case, None))}
        if case.dtype == "fp8":
            sides["humming FP8 tokens"] = case.each(partial(self._call, case, self.fp8_tokens))
        return sides

    def _call(self, case: PeerCase, token_format: dict[str, Any] | None, weights: Weights, tokens: Tokens) -> Call:
        shape = case.shape
        first, second = self._layers(case, token_format, weights)
        count, pairs = tokens.x.shape[0], tokens.topk_ids.numel()
        order = pair_order(tokens.topk_ids, shape.experts)
        compute = json.dumps({"gemm_type": "indexed"})
        arguments = []
        for layer in (first, second):
            tunings = self._heuristics(layer.humming_config, gemm_type="indexed")
            size = next(c["block_shape"][0] for low, high, c in tunings if low < pairs <= high)
            sorted_ids, expert_ids, padded = order.blocks(size)
            arguments.append({
                "sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": padded,
                "compute_config": compute, "tuning_config": json.dumps(tunings), "valid_shape_m": pairs,
            })  # fmt: skip
        gate_up = torch.empty(pairs, 2 * shape.width, dtype=torch.bfloat16, device=tokens.x.device)
        y = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device=tokens.x.device)
        rows = torch.arange(pairs, device=tokens.x.device).view(count, -1)
        out = torch.empty_like(tokens.x)
        mode = second.humming_config.input_quant_mode

        def call() -> torch.Tensor:
            first(tokens.x, outputs=gate_up, top_k=shape.top_k, **arguments[0])
            hidden, group_scales, token_scales = self._process(second.humming_config, inputs=gate_up, **self.silu)
            scale = group_scales if mode.has_group_scale else token_scales
            second(hidden, outputs=y, input_scale=scale, top_k=1, **arguments[1])
            return combine(y, rows, tokens.topk_weights, out)

        return call

    def _layers(self, case: PeerCase, token_format: dict[str, Any] | None, weights: Weights) -> tuple[Any, Any]:
        made = self.prepared(weights, lambda _: {})
        key = "bf16" if token_format is None else "fp8"
        if key not in made:
            parts = (
                (weights.w13, weights.w13_scale, weights.w13_zero, case.shape.hidden),
                (weights.w2, weights.w2_scale, weights.w2_zero, case.shape.width),
            )
            made[key] = tuple(self._layer(kind_of(case.dtype), token_format, part) for part in parts)
        return made[key]

    def _layer(
        self, kind: str, token_format: dict[str, Any] | None,
        part: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int],
    ) -> Any:  # fmt: skip
        codes, scale, zero, columns = part
        experts, rows = codes.shape[:2]
        assert scale is not None
        if kind == "fp8":
            if rows % 128 or columns % 128:
                raise NotOfferedError(f"blocks of 128 x 128 do not divide {rows} x {columns}")
            form: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
            tensors = {"weight": codes, "weight_scale_inv": scale}
        elif kind == "mxfp4":
            form, tensors = {"quant_method": "mxfp4"}, {"weight": codes, "weight_scale": scale}
        else:
            if zero is not None:
                raise NotOfferedError("zero points are not timed with peers")
            form = {"quant_method": "gptq", "bits": 4, "group_size": columns // scale.shape[2], "sym": True,
                    "desc_act": False}  # fmt: skip
            words = codes.view(torch.int32).transpose(1, 2).contiguous()
            tensors = {"qweight": words, "scales": scale.transpose(1, 2).contiguous()}
        with torch.device("cuda"):
            layer = self._class(
                shape_n=rows, shape_k=columns, weight_config=form, num_experts=experts, torch_dtype=torch.bfloat16,
                input_config=None if token_format is None else dict(token_format),
            )  # fmt: skip
            for name, tensor in tensors.items():
                setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
            layer.transform()
        return layer


class SglDeepGemm(Peer):
    """SGLang's DeepGEMM: rows of an expert contiguous, padded to its alignment; up to 64 tokens masked as well."""

    distribution = "sgl-deep-gemm"
    masked_up_to = 64

    def __init__(self) -> None:
        import deep_gemm

        self._library = deep_gemm

    def sides(self, case: PeerCase) -> Sides:
        """One or two sides."""
        if case.dtype == "fp8" and (case.shape.hidden % GROUP or case.shape.width % GROUP):
            raise NotOfferedError(f"groups of 128 do not divide {case.shape.hidden} and {case.shape.width}")
        layouts = ["contiguous"] + (["masked"] if case.inputs[0].x.shape[0] <= self.masked_up_to else [])
        return {f"sgl_deep_gemm {layout}": case.each(partial(self._call, case, layout)) for layout in layouts}

    def _call(self, case: PeerCase, layout: str, weights: Weights, tokens: Tokens) -> Call:
        shape, dtype = case.shape, case.dtype
        order = pair_order(tokens.topk_ids, shape.experts)
        device = tokens.x.device
        if layout == "masked":
            height = max(8, -(-tokens.x.shape[0] // 8) * 8)
            starts, total = torch.arange(shape.experts, device=device) * height, shape.experts * height
            grouped: tuple[Any, ...] = (order.counts.int(), max(1, tokens.topk_ids.numel() // shape.experts))
            leading: tuple[int, ...] = (shape.experts, height)
        else:
            alignment = int(self._library.get_mk_alignment_for_contiguous_layout())
            starts = order.aligned_offsets(alignment)
            total = int(starts[-1])
            experts = torch.arange(shape.experts, device=device)
            indices = torch.repeat_interleave(experts, starts.diff()).int()
            grouped, leading = (indices,), (total,)
        rows = order.rows_of_pairs(starts)
        gate_up = torch.empty(*leading, 2 * shape.width, dtype=torch.bfloat16, device=device)
        y = torch.empty(*leading, shape.hidden, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(tokens.x)
        by_token = rows.view(tokens.x.shape[0], -1)
        product = {"bf16": "bf16", "fp8": "fp8_fp4"}[dtype]
        run = getattr(self._library, f"m_grouped_{product}_gemm_nt_{layout}")
        if dtype == "bf16":
            token_of_row = torch.zeros(total, dtype=torch.int64, device=device)
            token_of_row[rows] = torch.arange(rows.numel(), device=device) // shape.top_k
            x = torch.empty(total, shape.hidden, dtype=torch.bfloat16, device=device)
            h = torch.zeros(*leading, shape.width, dtype=torch.bfloat16, device=device)

            def call() -> torch.Tensor:
                torch.index_select(tokens.x, 0, token_of_row, out=x)
                run(x.view(*leading, -1), weights.w13, gate_up, *grouped)
                silu_and_mul(gate_up, rows, h)
                run(h, weights.w2, y, *grouped)
                return combine(y, by_token, tokens.topk_weights, out)

            return call
        first = _scaled_rows(rows, leading, shape.hidden)
        second = _scaled_rows(rows, leading, shape.width)

        def call_fp8() -> torch.Tensor:
            quantize_tokens(tokens.x, shape.top_k, rows, first)
            run((first.values, first.scales), (weights.w13, weights.w13_scale), gate_up, *grouped)
            quantize_silu_and_mul(gate_up, rows, second)
            run((second.values, second.scales), (weights.w2, weights.w2_scale), y, *grouped)
            return combine(y, by_token, tokens.topk_weights, out)

        return call_fp8


def _scaled_rows(rows: torch.Tensor, leading: tuple[int, ...], columns: int) -> ScaledRows:
    """E4M3 rows and their scales as DeepGEMM reads them: of one group of columns, those of all rows side by side."""
    height, groups = leading[-1], columns // GROUP
    stored = -(-height // 4) * 4
    values = torch.zeros(*leading, columns, dtype=torch.float8_e4m3fn, device=rows.device)
    storage = torch.ones(*leading[:-1], groups, stored, dtype=torch.float32, device=rows.device)
    offsets = rows // height * groups * stored + rows % height if len(leading) > 1 else rows
    return ScaledRows(values, storage.mT[..., :height, :], offsets, stored)


def _interleaved(weights: Weights) -> torch.Tensor:
    """Row by row: gate, up, gate, up."""
    gate, up = weights.w13.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


class Quack(Peer):
    """QuACK's grouped GEMMs: tokens gathered and SwiGLU applied by the first; its default tiling, without its tuner."""

    distribution = "quack-kernels"

    def __init__(self) -> None:
        from quack.gemm_interface import gemm, gemm_gated

        self._library = SimpleNamespace(gemm=gemm, gemm_gated=gemm_gated)

    def sides(self, case: PeerCase) -> Sides:
        """One side."""
        return {"quack": case.each(partial(self._call, case.shape))}

    def _call(self, shape: Shape, weights: Weights, tokens: Tokens) -> Call:
        w13 = self.prepared(weights, _interleaved)
        order = pair_order(tokens.topk_ids, shape.experts)
        offsets, token_of_row = order.offsets, order.sorted_pairs // shape.top_k
        rows = order.rows_of_pairs(offsets.long()).view(tokens.x.shape[0], -1)
        pairs, device = rows.numel(), tokens.x.device
        hidden = torch.empty(pairs, shape.width, dtype=torch.bfloat16, device=device)
        y = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(tokens.x)

        def call() -> torch.Tensor:
            self._library.gemm_gated(
                tokens.x, w13.mT, activation="swiglu", postact_out=hidden, store_preact=False,
                cu_seqlens_m=offsets, A_idx=token_of_row, tuned=False,
            )  # fmt: skip
            self._library.gemm(hidden, weights.w2.mT, out=y, cu_seqlens_m=offsets, tuned=False)
            return combine(y, rows, tokens.topk_weights, out)

        return call


PEERS: dict[str, type[Peer]] = {
    "flashinfer_cutlass": FlashInferCutlass,
    "flashinfer_cutedsl": FlashInferCuteDsl,
    "humming": Humming,
    "sgl_deep_gemm": SglDeepGemm,
    "quack": Quack,
}


def find_peers(names: list[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that can be imported here, and why the others cannot."""
    found, absent = {}, {}
    for name in names:
        try:
            found[name] = PEERS[name]()
        except Exception as error:  # noqa: BLE001  a library may fail in any way when it is imported; it is a row
            absent[name] = reason(error)
    return found, absent


def reason(error: BaseException) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NotOfferedError) else f"{type(error).__name__}: {text}"[:400]


def add_peers(
    peers: dict[str, Peer], case: PeerCase, sides: Sides, error_of: Callable[[torch.Tensor], float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Add to `sides` what is right and can be captured as a graph.

    Returns:
        the error of each side that ran, and why a peer or one of its sides is not there
    """
    errors, absent = {}, {}
    for name, peer in peers.items():
        if kind_of(case.dtype) not in PEER_FORMATS[name]:
            absent[name] = f"no kernel for {case.dtype} weights on Hopper"
            continue
        try:
            offered = peer.sides(case)
        except Exception as error:  # noqa: BLE001  as in find_peers
            absent[name] = reason(error)
            continue
        for side, calls in offered.items():
            try:
                errors[side] = error_of(calls[0]())
                capture(_right(calls, errors[side], PEER_ERROR[kind_of(case.dtype)]))
            except Exception as error:  # noqa: BLE001  as in find_peers
                absent[side] = reason(error)
            else:
                sides[side] = calls
    return errors, absent


def _right(calls: list[Call], error: float, bound: float) -> list[Call]:
    if not error <= bound:  # NaN is not <=
        raise NotOfferedError(f"wrong: its error over the norm is {error:.2e}, more than {bound}")
    return calls
