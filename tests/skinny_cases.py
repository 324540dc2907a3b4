"""Calls of the product of few tokens with a weight matrix, for the kernel's emulation and for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from tests.kernel_emulator import guarded

SCALES = ("tensor", "channel", "block")
"""Of E4M3 weights."""


def make_skinny_case(
    tokens: int,
    rows: int,
    depth: int,
    *,
    device: str = "cpu",
    bias: bool = False,
    padding: int = 0,
    seed: int = 1,
    scales: str | None = None,
) -> SkinnyGemm:
    """Return fresh random inputs with a poisoned output.

    Args:
        tokens: T.
        rows: N.
        depth: K.
        device: where they are; on the CPU each ends where an unreadable page begins.
        bias: whether there is one.
        padding: elements between rows of x and of the output.
        seed: of the random numbers.
        scales: one of `SCALES`: the weight is E4M3, its scales differ by up to 30 times; None: it is BF16.
    """
    g = torch.Generator().manual_seed(seed)
    place = guarded if device == "cpu" else lambda tensor: tensor.to(device)
    x = place(torch.randn(tokens, depth + padding, generator=g).bfloat16())[:, :depth]
    values = torch.randn(rows, depth, generator=g)
    w, scale = place((values / depth**0.5).bfloat16()), None
    if scales is not None:
        w = place((64 * values).clamp(-448, 448).to(torch.float8_e4m3fn))
        shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-depth // 128))}[scales]
        scale = place(torch.rand(shape, generator=g) * 0.03 + 0.001)
    out = place(torch.full((tokens, rows + padding), float("nan")).bfloat16())[:, :rows]
    return SkinnyGemm(x, w, place(torch.randn(rows, generator=g).bfloat16()) if bias else None, out, scale)


def exact_weight(call: SkinnyGemm) -> Tensor:
    """The weight that the call's stands for, in float64."""
    w, scale = call.w.double(), call.scale
    if scale is None:
        return w
    factors = scale.double()
    if factors.shape[0] not in (1, w.shape[0]) or (factors.dim() == 2 and factors.shape[1] > 1):
        factors = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
    return w * factors


def assert_multiplied(call: SkinnyGemm) -> None:
    """The output is the exact product but for one rounding to BF16 and what FP32 sums of K terms lose."""
    x, w = call.x.double(), exact_weight(call)
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
