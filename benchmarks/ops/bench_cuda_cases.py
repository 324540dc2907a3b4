"""Shapes, inputs and floors of the CUDA benchmark."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops.four_bit_codes import rows_on_lines
from moe_optimizer.ops.kernel_arguments import CudaProblem


@dataclass(frozen=True)
class Shape:
    """One MoE layer."""

    name: str
    hidden: int
    width: int
    experts: int
    """In this process."""
    top_k: int
    global_experts: int = 0
    """Of the whole layer, where expert parallelism leaves a part of them here; 0: all are here."""

    @property
    def routed_experts(self) -> int:
        """How many experts the gate chooses from."""
        return self.global_experts or self.experts


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("qwen3-30b-a3b-tp2", 2048, 384, 128, 8),
        Shape("qwen3-30b-a3b-tp4", 2048, 192, 128, 8),
        Shape("qwen3-30b-a3b-tp8", 2048, 96, 128, 8),
        Shape("qwen3-30b-a3b-ep2", 2048, 768, 64, 8, 128),
        Shape("qwen3-30b-a3b-ep4", 2048, 768, 32, 8, 128),
        Shape("olmoe-1b-7b", 2048, 1024, 64, 8),
        Shape("mixtral-8x7b-tp4", 4096, 3584, 8, 2),
        Shape("mixtral-8x7b-tp2", 4096, 7168, 8, 2),
        Shape("mixtral-8x7b-ep2", 4096, 14336, 4, 2, 8),
        Shape("qwen3-235b-a22b-tp4", 4096, 384, 128, 8),
        Shape("qwen3-235b-a22b-tp8", 4096, 192, 128, 8),
        Shape("qwen3-235b-a22b-ep8", 4096, 1536, 16, 8, 128),
        Shape("glm-4.5-air-tp2", 4096, 704, 128, 8),
        Shape("deepseek-v3-tp8", 7168, 256, 256, 8),
        Shape("deepseek-v3-ep16", 7168, 2048, 16, 8, 256),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4),
        Shape("gpt-oss-120b-tp2", 2880, 1440, 128, 4),
        Shape("gpt-oss-120b-tp4", 2880, 736, 128, 4),  # vLLM fills slices up to whole groups of 32
        Shape("gpt-oss-120b-tp8", 2880, 384, 128, 4),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4),
        Shape("qwen3-next-80b-a3b", 2048, 512, 512, 10),
        Shape("qwen3-next-80b-a3b-tp2", 2048, 256, 512, 10),
    )
}
TINY = Shape("tiny", 272, 208, 6, 2)
TINY_MXFP4 = Shape("tiny", 288, 224, 6, 2)
"""The sizes of MXFP4 are multiples of 32."""
TINY_INT4 = Shape("tiny", 384, 640, 6, 2)
"""Those of INT4 are multiples of its groups."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


DTYPES = ("bf16", "fp8", "mxfp4", "int4_g32z", "int4_g128")
"""Of which the families are checked. INT4 has groups of 32, 64 or 128 weights; z: with zero points."""
_BYTES = {"bf16": 2, "fp8": 1, "mxfp4": 17 / 32}
"""Of a weight; that of MXFP4 with its share of an exponent."""
_INT4 = re.compile(r"int4_g(32|64|128)(z?)")


def is_int4(dtype: str) -> bool:
    """Whether the name is one of INT4."""
    return _INT4.fullmatch(dtype) is not None


PEER_FORMATS: dict[str, tuple[str, ...]] = {
    "humming": ("fp8", "mxfp4", "int4"),
    "sgl_deep_gemm": ("bf16", "fp8"),
    "quack": ("bf16",),
    "flashinfer_cutedsl": ("bf16",),
    "flashinfer_cutlass": ("bf16", "fp8", "mxfp4"),
}
"""Weights that a library of bench_cuda_peers.py has kernels for on Hopper."""


def why_no_weights(shape: Shape, dtype: str) -> str:
    """Return why the shape has no weights of this type, or "": groups of INT4 are whole."""
    match = _INT4.fullmatch(dtype)
    if match is None or not (shape.hidden % int(match[1]) or shape.width % int(match[1])):
        return ""
    return f"{dtype}: {shape.name} has {shape.hidden} and {shape.width} columns, not whole groups of {match[1]}"


def kind_of(dtype: str) -> str:
    """The format without the size of its groups."""
    return "int4" if is_int4(dtype) else dtype


def bytes_per_weight(dtype: str) -> float:
    """With its share of what its group has, as our kernels read it: a scale of 2 bytes, a zero point of 1."""
    match = _INT4.fullmatch(dtype)
    return _BYTES[dtype] if match is None else 0.5 + (3 if match[2] else 2) / int(match[1])


@dataclass(frozen=True)
class Weights:
    """One weight set: BF16, E4M3 with 128 x 128 scales, MXFP4, or INT4 with BF16 scales."""

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    w13_zero: Tensor | None = None
    w2_zero: Tensor | None = None


def make_weights(shape: Shape, dtype: str, seed: int) -> Weights:
    """Random weights on the GPU, never zeros but for a sixteenth of 4-bit codes."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    if dtype == "mxfp4":
        return _make_mxfp4(shape, g)
    match = _INT4.fullmatch(dtype)
    if match is not None:
        return _make_int4(shape, int(match[1]), zero_points=bool(match[2]), g=g)
    w13 = torch.empty(shape.experts, 2 * shape.width, shape.hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(shape.experts, shape.hidden, shape.width, device="cuda", dtype=torch.bfloat16)
    w13.normal_(0, shape.hidden**-0.5, generator=g)
    w2.normal_(0, shape.width**-0.5, generator=g)
    if dtype == "bf16":
        return Weights(w13, w2, None, None)
    w13_scale = torch.rand(
        shape.experts, -(-2 * shape.width // 128), -(-shape.hidden // 128), device="cuda", generator=g
    ).mul_(0.02).add_(0.01)  # fmt: skip
    w2_scale = torch.rand(
        shape.experts, -(-shape.hidden // 128), -(-shape.width // 128), device="cuda", generator=g
    ).mul_(0.02).add_(0.01)  # fmt: skip
    to_fp8 = lambda w: torch.stack([(e.float() * 64).to(torch.float8_e4m3fn) for e in w])  # noqa: E731
    return Weights(to_fp8(w13), to_fp8(w2), w13_scale, w2_scale)


def _make_mxfp4(shape: Shape, g: torch.Generator) -> Weights:
    """Codes and exponents drawn evenly: scales over a range of 2**5, products about 1."""

    def codes_and_exponents(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(
            0, 256, (shape.experts, rows, columns // 2), device="cuda", dtype=torch.uint8, generator=g
        )
        middle = 127 - 2 - round(math.log2(columns) / 2)
        exponents = torch.randint(
            middle - 4, middle + 2, (shape.experts, rows, columns // 32), device="cuda", dtype=torch.uint8, generator=g
        )
        return codes, exponents

    (w13, w13_scale), (w2, w2_scale) = (
        codes_and_exponents(2 * shape.width, shape.hidden),
        codes_and_exponents(shape.hidden, shape.width),
    )
    return Weights(rows_on_lines(w13), rows_on_lines(w2), w13_scale, w2_scale)  # as experts of gpt-oss are held


def _make_int4(shape: Shape, group: int, *, zero_points: bool, g: torch.Generator) -> Weights:
    """Codes and zero points drawn evenly, scales over a range of 4, products about 1."""

    def parts(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        def bytes_below(limit: int, width: int) -> Tensor:
            size = (shape.experts, rows, width)
            return torch.randint(0, limit, size, device="cuda", dtype=torch.uint8, generator=g)

        scale = torch.rand(shape.experts, rows, columns // group, device="cuda", generator=g)
        scale = scale.add_(0.33).mul_(0.2 * columns**-0.5).bfloat16()
        return bytes_below(256, columns // 2), scale, bytes_below(16, columns // group) if zero_points else None

    (w13, w13_scale, w13_zero), (w2, w2_scale, w2_zero) = (
        parts(2 * shape.width, shape.hidden),
        parts(shape.hidden, shape.width),
    )
    return Weights(w13, w2, w13_scale, w2_scale, w13_zero, w2_zero)


def why_not_marlin(shape: Shape, dtype: str) -> str:
    """Return why vLLM gives these weights to no kernel of Marlin's, or "": those of MXFP4 it pads (`padded_mxfp4`)."""
    match = _INT4.fullmatch(dtype)
    if match is None or (shape.hidden % 128 == 0 and shape.width % max(64, int(match[1])) == 0):
        return ""
    return f"{shape.name}: Marlin takes INT4 of whole 128 and {max(64, int(match[1]))} columns"


def padded_mxfp4(weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w13, w2 and their exponents with zeros up to whole 256 of H and 128 of I, as vLLM pads MXFP4 for Marlin."""
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    hidden, width = 2 * weights.w13.shape[2], 2 * weights.w2.shape[2]
    more_hidden, more_width = -hidden % 256, -width % 128

    def padded(parts: Tensor, rows: int, columns: int) -> Tensor:
        return torch.nn.functional.pad(parts, (0, columns, 0, rows))

    def of_gate_and_up(w13: Tensor, columns: int) -> Tensor:
        return torch.cat([padded(part, more_width, columns) for part in w13.chunk(2, 1)], 1)

    return (
        of_gate_and_up(weights.w13, more_hidden // 2),
        padded(weights.w2, more_hidden, more_width // 2),
        of_gate_and_up(weights.w13_scale, more_hidden // 32),
        padded(weights.w2_scale, more_hidden, more_width // 32),
    )


def padded_gate_up_in_turn(weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w13, whose gate and up rows are in turn, w2 and their exponents with zeros up to whole 64 of I, as vLLM pads
    MXFP4 for triton_kernels.
    """
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    more = -(2 * weights.w2.shape[2]) % 64
    pad = torch.nn.functional.pad
    return (
        pad(weights.w13, (0, 0, 0, 2 * more)),
        pad(weights.w2, (0, more // 2)),
        pad(weights.w13_scale, (0, 0, 0, 2 * more)),
        pad(weights.w2_scale, (0, more // 32)),
    )


def int4_values(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The weights [E, N, K] in FP32, which holds them exactly."""
    values = torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).float().unflatten(-1, (scale.shape[-1], -1))
    points = 8.0 if zero is None else zero.float().unsqueeze(-1)
    return ((values - points) * scale.float().unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Tokens:
    """Inputs of one call: fresh routing each."""

    x: Tensor
    logits: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    """Of the whole layer, int32."""
    expert_map: Tensor | None
    """int32 [global experts]: where an expert lies here, -1 for one of another process; None: all are here."""


def make_tokens(shape: Shape, tokens: int, routing: str, seed: int) -> Tokens:
    """Random activations; experts uniform, or Zipf 1.0 over a random order of the experts."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, device="cuda", generator=g).bfloat16()
    noise = -torch.log(
        -torch.log(torch.rand(tokens, shape.routed_experts, device="cuda", generator=g).clamp(1e-9, 1 - 1e-7))
    )
    if routing == "zipf":
        order = torch.randperm(shape.routed_experts, device="cuda", generator=g)
        noise = noise - torch.log1p(order.float())
    weights, ids = noise.softmax(-1).topk(shape.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return Tokens(x, noise.contiguous(), weights.contiguous(), ids.int().contiguous(), _expert_map(shape))


def _expert_map(shape: Shape) -> Tensor | None:
    """The first experts of the layer are here, as vLLM places them on its first rank."""
    if not shape.global_experts:
        return None
    expert_map = torch.full((shape.global_experts,), -1, device="cuda", dtype=torch.int32)
    expert_map[: shape.experts] = torch.arange(shape.experts, device="cuda", dtype=torch.int32)
    return expert_map


def problem_of(weights: Weights, tokens: Tokens) -> CudaProblem:
    """One call with its own poisoned output."""
    return CudaProblem(
        x=tokens.x,
        w13=weights.w13,
        w2=weights.w2,
        out=torch.full_like(tokens.x, float("nan")),
        topk_weights=tokens.topk_weights,
        topk_ids=tokens.topk_ids,
        w13_scale=weights.w13_scale,
        w2_scale=weights.w2_scale,
        w13_zero=weights.w13_zero,
        w2_zero=weights.w2_zero,
        expert_map=tokens.expert_map,
    )


def floor_us(shape: Shape, tokens: Tokens, *, dtype: str, bytes_per_s: float, flops_per_s: float) -> float:
    """Least time: every hit expert read once, activations in and out once; or the arithmetic, if that takes longer.

    FP8 arithmetic is counted at twice the measured BF16 rate; 4-bit weights are multiplied in BF16.
    """
    here = tokens.topk_ids[tokens.topk_ids < shape.experts]
    hit, pairs = int(here.unique().numel()), here.numel()
    weight_bytes = hit * 3 * shape.hidden * shape.width * bytes_per_weight(dtype)
    token_bytes = 2 * tokens.x.numel() * 2
    flops = 2.0 * pairs * 3 * shape.hidden * shape.width
    rate = flops_per_s * (2 if dtype == "fp8" else 1)
    return 1e6 * max((weight_bytes + token_bytes) / bytes_per_s, flops / rate)
