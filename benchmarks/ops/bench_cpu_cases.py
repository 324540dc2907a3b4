"""Layer shapes, weights and routings for the CPU benchmark, and vLLM's kernel beside ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.ops import reference
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.fused_experts import run
from moe_optimizer.ops.int4 import Int4Weight, quantize_int4
from moe_optimizer.ops.int4_experts import Int4Inputs, run_int4
from moe_optimizer.ops.mxfp4 import quantize_mxfp4

BLOCK = 128
FP8_MAX = 448.0


@dataclass(frozen=True)
class Shape:
    """One MoE layer as one process holds it."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def expert_bytes(self, bytes_per_weight: float) -> float:
        """Bytes of one expert's three matrices."""
        return 3 * self.hidden * self.intermediate * bytes_per_weight

    def flops(self, tokens: int) -> float:
        """Floating point operations of `tokens` tokens."""
        return 6.0 * tokens * self.top_k * self.hidden * self.intermediate


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b-tp4": Shape(4096, 3584, 8, 2),
    "olmoe-1b-7b": Shape(2048, 1024, 64, 8),
    # Of the size of DeepSeek-V3's. EP 16 would give a rank half of a token's 8 experts on average; here it is one.
    "deepseek-v3-16-experts-top1": Shape(7168, 2048, 16, 1),
}


@dataclass(frozen=True)
class Layer:
    """The experts in one format, as our kernels read them."""

    w13: Tensor | Int4Weight
    w2: Tensor | Int4Weight
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    def large_tensors(self) -> list[Tensor]:
        """Return what is moved to huge pages: the weights, not their scales."""
        return [weight.codes if isinstance(weight, Int4Weight) else weight for weight in (self.w13, self.w2)]


@dataclass(frozen=True)
class Weights:
    """The layer in some of `FORMATS`, and as vLLM repacks it."""

    layers: dict[str, Layer]
    w13_stock: Tensor
    w2_stock: Tensor


def load_stock(build: str) -> None:
    """Load vLLM's CPU kernels into torch: "avx512_bf16", or the "avx512" build for machines without BF16.

    The library alone, not `import vllm`: that would pick the build by itself.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("bench_fused_experts: vLLM's CPU build is not installed\n\nhint: make setup")
    name = {"avx512_bf16": "_C.abi3.so", "avx512": "_C_AVX512.abi3.so", "avx2": "_C_AVX2.abi3.so"}[build]
    torch.ops.load_library(Path(spec.submodule_search_locations[0]) / name)


def make_weights(shape: Shape, seed: int, formats: Sequence[str]) -> Weights:
    """Random weights: as the checkpoint has them, in `formats`, and as vLLM's kernel reads them."""
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.empty(shape.experts, 2 * shape.intermediate, shape.hidden, dtype=torch.bfloat16)
    w2 = torch.empty(shape.experts, shape.hidden, shape.intermediate, dtype=torch.bfloat16)
    w13.normal_(std=shape.hidden**-0.5, generator=generator)
    w2.normal_(std=shape.intermediate**-0.5, generator=generator)
    return Weights({name: FORMATS[name](w13, w2) for name in formats}, prepacked(w13), prepacked(w2))


def prepacked(weight: Tensor) -> Tensor:
    """Return a weight as vLLM's kernel reads it."""
    packed = torch.empty_like(weight)
    torch.ops._C.prepack_moe_weight(weight, packed, "vec")
    return packed


def _to_fp8(w13: Tensor, w2: Tensor) -> Layer:
    (w13_codes, w13_scale), (w2_codes, w2_scale) = _quantize(w13), _quantize(w2)
    return Layer(w13_codes, w2_codes, w13_scale, w2_scale)


def _to_mxfp4(w13: Tensor, w2: Tensor) -> Layer:
    (w13_codes, w13_exponents), (w2_codes, w2_exponents) = quantize_mxfp4(w13), quantize_mxfp4(w2)
    return Layer(w13_codes, w2_codes, w13_exponents, w2_exponents)


def _to_int4(group: int) -> Callable[[Tensor, Tensor], Layer]:
    return lambda w13, w2: Layer(quantize_int4(w13, group), quantize_int4(w2, group))


FORMATS: dict[str, Callable[[Tensor, Tensor], Layer]] = {
    "bf16": Layer,
    "fp8": _to_fp8,
    "mxfp4": _to_mxfp4,
    "int4-32": _to_int4(32),
    "int4-64": _to_int4(64),
    "int4-128": _to_int4(128),
}
"""FP8: E4M3 with scales of 128x128 weights. INT4: groups of so many, without zero points."""


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    experts, rows, columns = weight.shape
    out = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scale = torch.empty(experts, rows // BLOCK, columns // BLOCK)
    for expert in range(experts):
        blocks = weight[expert].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale[expert] = blocks.abs().amax((1, 3)) / FP8_MAX
        out[expert] = (blocks / scale[expert][:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return out, scale


@dataclass(frozen=True)
class Batch:
    """The activations and the routing of one call."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor

    def experts_hit(self) -> int:
        """How many different experts the batch reads."""
        return int(self.topk_ids.unique().numel())


def make_batch(shape: Shape, tokens: int, routing: str, generator: torch.Generator) -> Batch:
    """Fresh activations; experts drawn uniformly, or by Zipf's law (exponent 1) over a fresh ranking."""
    popularity = torch.ones(shape.experts)
    if routing == "zipf":
        popularity = 1.0 / torch.arange(1, shape.experts + 1)
        popularity = popularity[torch.randperm(shape.experts, generator=generator)]
    ids = torch.multinomial(popularity.expand(tokens, -1), shape.top_k, generator=generator).int()
    weights = torch.rand(tokens, shape.top_k, generator=generator) + 0.1
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    return Batch(x, weights / weights.sum(-1, keepdim=True), ids)


Side = Callable[[Batch, Tensor], None]


def make_sides(weights: Weights, isa: str) -> dict[str, Side]:
    """VLLM's kernel on its repacked BF16 weights, ours on each format."""

    def stock_bf16(batch: Batch, out: Tensor) -> None:
        torch.ops._C.cpu_fused_moe(
            *(out, batch.x, weights.w13_stock, weights.w2_stock, None, None),
            *(batch.topk_weights, batch.topk_ids, False, "silu", "vec"),
        )

    return {"stock_bf16": stock_bf16, **{f"ours_{name}": _ours(layer, isa) for name, layer in weights.layers.items()}}


def _ours(layer: Layer, isa: str) -> Side:
    w13, w2 = layer.w13, layer.w2

    def side(batch: Batch, out: Tensor) -> None:
        routing = (batch.topk_weights, batch.topk_ids)
        if isinstance(w13, Int4Weight) and isinstance(w2, Int4Weight):
            run_int4(Int4Inputs(batch.x, *w13, *w2, *routing, None, None, None, "silu"), out, isa=isa)
        elif isinstance(w13, Tensor) and isinstance(w2, Tensor):
            rest = (None, layer.w13_scale, layer.w2_scale, None, None, "silu")
            run(Inputs(batch.x, w13, w2, *routing, *rest), out, isa=isa)

    return side


def check_sides(weights: Weights, sides: dict[str, Side], batch: Batch) -> dict[str, float]:
    """Return each side's largest error against FP32, relative to torch's own in BF16.

    Raises:
        SystemExit: an error is above twice torch's.
    """
    ratios = {}
    for name, side in sides.items():
        layer = weights.layers[name.rsplit("_", 1)[1]]
        keywords: dict[str, Any] = {}
        if layer.w13_scale is not None:
            keywords = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
        given = (layer.w13, layer.w2, batch.topk_weights, batch.topk_ids)
        want = reference.fused_experts(batch.x.float(), *given, **keywords)
        in_torch = reference.fused_experts(batch.x, *given, **keywords, compute_dtype=torch.bfloat16)
        out = torch.full_like(batch.x, float("nan"))
        side(batch, out)
        ratios[name] = float((out.float() - want).abs().max() / (in_torch.float() - want).abs().max())
        if not ratios[name] <= 2:
            raise SystemExit(f"bench_fused_experts: {name} is wrong: error {ratios[name]:.2f} times torch's in BF16")
    return ratios
