"""Tensors that are parts of larger ones: the compiled experts read and write them in place, at any address."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compiled_kernels import needs_kernels
from tests.ops.moe_cases import DTYPES, make_case, quantized

pytestmark = needs_kernels

FILL = 7.0
GAPS = st.lists(st.integers(0, 9), min_size=3, max_size=3)


def inside(tensor: Tensor, gaps: list[int]) -> tuple[Tensor, Tensor]:
    """Return a tensor filled with FILL, and the part of it that equals `tensor`: gaps behind rows, before, around."""
    behind, before, around = gaps
    *leading, columns = tensor.shape
    whole = torch.full((*(size + around for size in leading), before + columns + behind), FILL).to(tensor.dtype)
    part = whole[(*(slice(0, size) for size in leading), slice(before, before + columns))]
    part.copy_(tensor)
    return whole, part


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 5, 11, 33]),
    hidden=st.integers(1, 8).map(lambda n: 16 * n),
    width=st.integers(1, 8).map(lambda n: 16 * n),
    dtype=st.sampled_from(DTYPES),
    scales=st.sampled_from(["", "block", "channel"]),
    gaps=st.tuples(GAPS, GAPS, GAPS, GAPS),
    seed=st.integers(0, 2**31),
)
def test_parts_of_larger_tensors_give_the_same_bits(
    tokens: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    scales: str,
    gaps: tuple[list[int], list[int], list[int], list[int]],
    seed: int,
) -> None:
    case = make_case(tokens, hidden, width, experts=3, dtype=dtype, seed=seed)
    case = quantized(case, scales) if scales else case
    want = case.kernel()
    parts: dict[str, Any] = {
        name: inside(getattr(case, name), gap)[1] for name, gap in zip(("x", "w13", "w2"), gaps, strict=False)
    }
    whole, out = inside(torch.zeros_like(want), gaps[3])
    replace(case, **parts).kernel(out=out)
    assert torch.equal(out, want)
    out.fill_(FILL)
    assert (whole == FILL).all(), "written beside the output"
