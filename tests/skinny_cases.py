"""Calls of the product of few tokens with a weight matrix, for the kernel's emulation and for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from tests.kernel_emulator import guarded


def make_skinny_case(
    tokens: int, rows: int, depth: int, *, device: str = "cpu", bias: bool = False, padding: int = 0, seed: int = 1
) -> SkinnyGemm:
    """Return fresh random inputs with a poisoned output; `padding`: elements between rows of x and of the output."""
    g = torch.Generator().manual_seed(seed)
    place = guarded if device == "cpu" else lambda tensor: tensor.to(device)
    x = place(torch.randn(tokens, depth + padding, generator=g).bfloat16())[:, :depth]
    w = place((torch.randn(rows, depth, generator=g) / depth**0.5).bfloat16())
    out = place(torch.full((tokens, rows + padding), float("nan")).bfloat16())[:, :rows]
    return SkinnyGemm(x, w, place(torch.randn(rows, generator=g).bfloat16()) if bias else None, out)


def assert_multiplied(call: SkinnyGemm) -> None:
    """The output is the exact product but for one rounding to BF16 and what FP32 sums of K terms lose."""
    x, w = call.x.double(), call.w.double()
    exact, terms = x @ w.T, x.abs() @ w.abs().T
    if call.bias is not None:
        exact = exact + call.bias.double()
        terms = terms + call.bias.double().abs()
    bound = exact.abs() * 2.0**-8 + terms * 2.0**-20 + 1e-30
    assert ((call.out.double() - exact).abs() <= bound).all()


def poisoned(call: SkinnyGemm) -> SkinnyGemm:
    """The same call after its output was overwritten."""
    call.out.fill_(float("nan"))
    return call


def result(call: SkinnyGemm) -> Tensor:
    """A copy of what the call wrote."""
    return call.out.clone()
