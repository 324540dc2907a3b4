"""Random MoE layers for the tests of the ops, and the bound on a kernel's error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.ops import fused_experts, reference
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.fused_experts import run
from moe_optimizer.ops.mxfp4 import quantize_mxfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_MAX = 448.0


@dataclass(frozen=True)
class Case:
    """One layer and its inputs."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None = None
    activation: str = "silu"
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def kernel(self, out: Tensor | None = None) -> Tensor:
        return fused_experts(*self._positional(), **self.keywords(), out=out)

    def on_isa(self, isa: str) -> Tensor:
        """The kernel of a lesser instruction set."""
        out = torch.full_like(self.x, float("nan"))
        run(self.inputs(), out, isa=isa)
        return out

    def inputs(self) -> Inputs:
        return Inputs(*self._positional(), **self.keywords())

    def in_torch(self, dtype: torch.dtype) -> Tensor:
        """The reference with every step in `dtype`, as float64."""
        case = self
        if dtype == torch.float64:  # so that the output is not rounded to x.dtype either
            case = replace(self, x=self.x.double())
        return reference.fused_experts(*case._positional(), **case.keywords(), compute_dtype=dtype).double()

    def _positional(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.w13, self.w2, self.topk_weights, self.topk_ids

    def keywords(self) -> dict[str, Any]:
        return {
            "expert_map": self.expert_map,
            "activation": self.activation,
            "w13_scale": self.w13_scale,
            "w2_scale": self.w2_scale,
            "w13_bias": self.w13_bias,
            "w2_bias": self.w2_bias,
        }

    def parts(self) -> Iterator[tuple[slice, Case]]:
        """A token alone, and few and many of the case's 70: rows of it, and the case of these rows."""
        for rows in (slice(0, 1), slice(10, 13), slice(20, 29), slice(40, 70)):
            yield rows, self.of_rows(rows)

    def of_rows(self, rows: slice) -> Case:
        return replace(self, x=self.x[rows], topk_ids=self.topk_ids[rows], topk_weights=self.topk_weights[rows])


def make_case(
    tokens: int,
    hidden: int = 64,
    intermediate: int = 48,
    experts: int = 8,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    biases: bool = False,
    activation: str = "silu",
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return Case(
        x=normal(tokens, hidden),
        w13=normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        w2=normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        topk_weights=torch.rand(tokens, top_k, generator=generator),
        topk_ids=torch.randint(experts, (tokens, top_k), generator=generator),
        w13_bias=normal(experts, 2 * intermediate).float() if biases else None,
        w2_bias=normal(experts, hidden).float() if biases else None,
        activation=activation,
    )


def of_one_expert_each(tokens: Sequence[int], *, step: int, most: int) -> st.SearchStrategy[Callable[..., Case]]:
    """Cases that lack only their dtype: one of these numbers of tokens, sizes up to `most` times `step`."""
    sizes = st.integers(1, most).map(lambda n: step * n)
    return st.builds(
        partial, st.just(make_case), st.sampled_from(tokens), sizes, sizes, st.integers(1, 3), st.just(1),
        seed=st.integers(0, 2**31), biases=st.booleans(), activation=st.sampled_from(["silu", "swigluoai"]),
    )  # fmt: skip


@st.composite
def any_cases(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = DTYPES,
    activations: Sequence[str] = ("silu",),
    biases: Sequence[bool] = (False,),
) -> Case:
    """Any shape and routing that the compiled kernels take; some slots have no expert."""
    sixteens = st.integers(1, 10).map(lambda n: 16 * n)
    tokens, experts, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 8))
    dtype, with_biases = draw(st.sampled_from(dtypes)), draw(st.sampled_from(biases))
    seed = draw(st.integers(0, 2**31))
    activation = draw(st.sampled_from(activations))
    case = make_case(tokens, draw(sixteens), draw(sixteens), experts, top_k, dtype, seed, with_biases, activation)
    ids = case.topk_ids.to(draw(st.sampled_from([torch.int32, torch.int64])))
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < draw(st.floats(0, 1))] = -1
    return replace(case, topk_ids=ids)


def assert_as_exact_as_torch(case: Case, got: Tensor) -> None:
    assert_each_as_exact_as_torch(case, {"it": got})


def assert_each_as_exact_as_torch(case: Case, got: Mapping[str, Tensor]) -> None:
    want = case.in_torch(torch.float64)
    allowed = allowed_error(case, want)
    for name, each in got.items():
        error = (each.double() - want).abs().max().item() if each.numel() else 0.0
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def allowed_error(case: Case, want: Tensor) -> float:
    """Return twice the error of torch in the case's dtype.

    Of few outputs all of torch's can happen to be right; an error of one rounding of the largest is taken for torch's.
    """
    if not want.numel():
        return 0.0
    dtype = case.x.dtype
    rounding = torch.finfo(dtype).eps / 2 * want.abs().max().item()
    return 2 * max((case.in_torch(dtype) - want).abs().max().item(), rounding) + 1e-5


def quantized(case: Case, scales: str) -> Case:
    """`case` with E4M3 weights and scales per "block" of 128x128 or per output "channel"."""
    w13, w13_scale = _quantize(case.w13.float(), scales)
    w2, w2_scale = _quantize(case.w2.float(), scales)
    return replace(case, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


def in_four_bits(case: Case) -> Case:
    """`case` with MXFP4 weights; H and I are multiples of 32."""
    w13, w13_scale = quantize_mxfp4(case.w13)
    w2, w2_scale = quantize_mxfp4(case.w2)
    return replace(case, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


def _quantize(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    experts, rows, columns = weight.shape
    if scales == "channel":
        scale = weight.abs().amax(-1) / FP8_MAX
        return (weight / scale[..., None]).to(torch.float8_e4m3fn), scale
    block = reference.SCALE_BLOCK
    row_blocks, column_blocks = -(-rows // block), -(-columns // block)
    padded = torch.zeros(experts, row_blocks * block, column_blocks * block)
    padded[:, :rows, :columns] = weight
    blocks = padded.view(experts, row_blocks, block, column_blocks, block)
    scale = blocks.abs().amax((2, 4)) / FP8_MAX
    quantized_blocks = (blocks / scale[:, :, None, :, None]).reshape(padded.shape)
    return quantized_blocks[:, :rows, :columns].contiguous().to(torch.float8_e4m3fn), scale
