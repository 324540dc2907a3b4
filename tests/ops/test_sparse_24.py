"""2:4 pruning and its storage: what is kept, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops.sparse_24 import expand_24, prune_24


def random_weight(experts: int, rows: int, columns: int, seed: int, levels: int = 0) -> Tensor:
    """`levels`: so few different magnitudes that ties and zeros are everywhere; 0: as many as BF16 has."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, rows, columns, generator=generator)
    return (weight * levels).round().div(levels).bfloat16() if levels else weight.bfloat16()


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6).map(lambda n: 16 * n))


@given(shape=shapes, seed=st.integers(0, 2**31), levels=st.sampled_from([0, 1, 3]), with_norms=st.booleans())
def test_two_of_every_four_are_kept_unchanged_and_none_that_is_left_scores_more(
    shape: tuple[int, int, int], seed: int, levels: int, with_norms: bool
) -> None:
    weight = random_weight(*shape, seed, levels)
    norms = torch.rand(shape[0], shape[2], generator=torch.Generator().manual_seed(seed)) if with_norms else None
    sparse = prune_24(weight, norms)
    ones = torch.ones_like(sparse.values)
    kept = expand_24(sparse._replace(values=ones)).bool()
    groups = kept.unflatten(-1, (-1, 4))
    assert (groups.sum(-1) == 2).all()
    assert torch.equal(expand_24(sparse), torch.where(kept, weight, 0))
    scores = weight.float().abs() * (1.0 if norms is None else norms[:, None])
    least_kept = torch.where(groups, scores.unflatten(-1, (-1, 4)), float("inf")).amin(-1)
    most_left = torch.where(groups, -1.0, scores.unflatten(-1, (-1, 4))).amax(-1)
    assert (least_kept >= most_left).all()


@given(shape=shapes, seed=st.integers(0, 2**31))
def test_what_was_pruned_once_is_stored_as_it_is(shape: tuple[int, int, int], seed: int) -> None:
    once = prune_24(random_weight(*shape, seed))
    again = prune_24(expand_24(once))
    assert torch.equal(expand_24(again), expand_24(once))


def test_it_takes_nine_sixteenths_of_the_bytes() -> None:
    weight = random_weight(2, 32, 64, 0)
    sparse = prune_24(weight)
    assert (sparse.values.nbytes + sparse.mask.nbytes) * 16 == weight.nbytes * 9


def test_bits_and_values_lie_in_the_order_of_the_columns() -> None:
    row = torch.tensor([9, 0, 8, 0, 0, 7, 0, 6, 0, 0, 5, 4, 3, 2, 0, 0]).bfloat16()
    sparse = prune_24(row[None, None])
    assert sparse.mask.tolist() == [[[0b10100101, 0b00111100]]]
    assert sparse.values.tolist() == [[[9, 8, 7, 6, 5, 4, 3, 2]]]


def test_a_loud_input_saves_a_small_weight() -> None:
    weight = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4).bfloat16()[None, None]
    norms = torch.tensor([1.0, 1.0, 1.0, 9.0] * 4)
    assert expand_24(prune_24(weight)).flatten()[:4].tolist() == [4, 3, 0, 0]
    assert expand_24(prune_24(weight, norms)).flatten()[:4].tolist() == [4, 0, 0, 1]


def test_of_equals_the_earlier_are_kept() -> None:
    weight = torch.ones(1, 1, 16).bfloat16()
    assert expand_24(prune_24(weight)).flatten().tolist() == [1, 1, 0, 0] * 4


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(1, 4, 24, dtype=torch.bfloat16), "multiple of 16"),
        (torch.ones(1, 4, 16), r"got torch.float32 \[1, 4, 16\]"),
        (torch.ones(4, 16, dtype=torch.bfloat16), r"expected torch.bfloat16 \[E, N, K\]"),
        (torch.full((1, 4, 16), float("nan"), dtype=torch.bfloat16), "expert 0 .*not finite"),
    ],
    ids=["ragged", "float32", "one expert", "nan"],
)
def test_weights_of_another_shape_dtype_or_not_finite_are_refused(weight: Tensor, words: str) -> None:
    with pytest.raises(TensorContractError, match=words):
        prune_24(weight)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        (torch.ones(8), r"\[8\], .*\[16\] or \[2, 16\]"),
        (torch.full((16,), -1.0), "not finite"),
        (torch.full((2, 16), float("nan")), "not finite"),
    ],
    ids=["length", "negative", "nan"],
)
def test_norms_of_another_length_negative_or_not_finite_are_refused(norms: Tensor, words: str) -> None:
    with pytest.raises(TensorContractError, match=words):
        prune_24(random_weight(2, 4, 16, 0), norms)
