"""Norms, rotations and storing in one pass against the engine's plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_optimizer.engine.layers.norm import normalized
from moe_optimizer.engine.layers.rope import rotate
from moe_optimizer.ops import token_rows
from tests.compiled_kernels import needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10"),
]

EPS = 1e-6
ERROR = 3e-7
"""Relative to results of about 1: two roundings of float32."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# Sizes: below a register, odd, several registers and a rest; no token, one, more than one thread takes.
@pytest.mark.parametrize(("tokens", "size"), [(0, 16), (1, 3), (2, 37), (5, 128), (2000, 48)])
def test_a_sum_and_its_norm_are_those_of_torch(tokens: int, size: int) -> None:
    x, residual, weight = random(tokens, 2 * size)[:, :size], random(tokens, size + 1)[:, 1:], random(size)
    found = token_rows.add_rms_norm(x, residual, weight, EPS)
    assert found is not None
    out, total = found
    assert torch.equal(total, x + residual)
    want = normalized(total.double(), weight.double(), EPS)
    assert ((out - want).abs() <= ERROR * want.abs()).all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(0, (2, 1), 8), (1, (1, 1), 6), (3, (4, 2), 64), (999, (3, 1), 20)]
)
def test_heads_are_turned_as_by_torch(tokens: int, heads: tuple[int, int], size: int, normed: bool) -> None:
    values = random(tokens, sum(heads) + 2, size)
    x, rest = values[:, : sum(heads)], values[:, sum(heads) :].clone()
    cos, sin = random(tokens, 1, size), random(tokens, 2, size)[:, :1]
    weights = (random(size), random(size).flip(0)) if normed else None
    want = x.double()
    if weights is not None:
        each = torch.cat([weight.expand(count, -1) for weight, count in zip(weights, heads, strict=True)])
        want = normalized(want, each.double(), EPS)
    want = rotate(want, cos.double(), sin.double())
    before = x.clone()
    assert token_rows.turn_heads(x, heads[0], (cos, sin), weights, EPS)
    assert torch.equal(values[:, sum(heads) :], rest)
    if weights is None:
        assert torch.equal(x, rotate(before, cos, sin))
    largest = want.abs().amax((-1, -2), keepdim=True)
    assert ((x - want).abs() <= 4 * ERROR * largest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_lie_in_their_slots_and_nothing_else_changes(dtype: torch.dtype) -> None:
    source = random(5, 6, 8).to(dtype)[:, 2:4]
    target = random(4, 3, 2, 8).to(dtype)
    slots = torch.tensor([11, 0, -1, 7, 4])
    want = target.clone()
    kept = slots >= 0
    want.flatten(0, 1).index_copy_(0, slots[kept], source[kept])
    assert token_rows.store_rows(source, slots, target)
    assert torch.equal(target, want)


def test_what_is_not_computed_is_left_alone() -> None:
    x, weight, cos = random(3, 8), random(8), random(3, 1, 8)
    for wrong in ((x.bfloat16(), x), (x, x.bfloat16()), (x, x[:2]), (x, x.T.contiguous().T), (x[0], x[0])):
        assert token_rows.add_rms_norm(*wrong, weight, EPS) is None
    assert token_rows.add_rms_norm(x, x, weight[:7], EPS) is None
    heads = random(3, 2, 8)
    before = heads.clone()
    for x_TNd in (heads[:2], heads[..., :7], heads[..., ::2], heads.half(), heads[:, 0]):
        assert not token_rows.turn_heads(x_TNd, 1, (cos, cos), None, EPS)
    assert not token_rows.turn_heads(heads, 1, (cos, cos), (weight, weight[:4]), EPS)
    target, slots = random(2, 2, 2, 8), torch.tensor([0, 1, 2])
    kept = target.clone()
    for source, places in ((heads[:2], slots), (heads, slots.int()), (heads.half(), slots), (heads, slots + 2)):
        assert not token_rows.store_rows(source, places, target)
    assert torch.equal(heads, before)
    assert torch.equal(target, kept)
