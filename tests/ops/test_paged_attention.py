"""The kernel for attention over pages against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import paged_attention, reference
from moe_optimizer.ops.paged_attention import AttentionInputs, run_attention
from tests.compiled_kernels import ISAS, needs_kernels

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_ERROR = 2e-6
"""Of outputs up to about 3: some units in the last place, as the tests of the engine's other backends allow."""


def make_inputs(
    lengths: list[int], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype = torch.float32
) -> AttentionInputs:
    """Contexts in shuffled blocks; `heads` are query heads, key/value heads and head size.

    Every place that no context holds, and every table entry behind a context, is one that must not be read.
    """
    query_heads, kv_heads, size = heads
    torch.manual_seed(0)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 1
    shuffled = iter(torch.randperm(num_blocks).tolist())
    tables = torch.full((len(lengths), max(counts, default=0) + 1), -1, dtype=torch.int32)
    cache = torch.full((2, num_blocks, block_size, kv_heads, size), float("nan"), dtype=dtype)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for column in range(count):
            block = tables[row, column] = next(shuffled)
            held = min(block_size, length - column * block_size)
            cache[:, block, :held] = torch.randn(2, held, kv_heads, size).to(dtype)
    q = torch.randn(len(lengths), query_heads, size).to(dtype)
    return AttentionInputs(q, cache[0], cache[1], tables, torch.tensor(lengths, dtype=torch.int64))


def on_isa(inputs: AttentionInputs, isa: str = "") -> Tensor:
    """The result, written between rows that must stay as they are."""
    guarded = torch.full((inputs.q.shape[0] + 2, *inputs.q.shape[1:]), 7.0, dtype=inputs.q.dtype)
    run_attention(inputs, guarded[1:-1], isa=isa)
    assert (guarded[[0, -1]] == 7).all()
    return guarded[1:-1]


def in_float64(inputs: AttentionInputs) -> Tensor:
    """One sequence and one head after the other."""
    q, keys, values, tables, lengths = inputs
    out = torch.zeros(q.shape, dtype=torch.float64)
    shared = q.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths.tolist()):
        for head in range(q.shape[1] if length else 0):
            blocks = tables[row, : -(-length // keys.shape[1])].long()
            k, v = (each[blocks].flatten(0, 1)[:length, head // shared].double() for each in (keys, values))
            out[row, head] = (k @ q[row, head].double() * q.shape[2] ** -0.5).softmax(0) @ v
    return out


def assert_exact(got: Tensor, inputs: AttentionInputs) -> None:
    """Within float32's error of the exact result, rounded once to the dtype."""
    want = in_float64(inputs)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    assert not got.isnan().any()
    assert ((got.double() - want).abs() <= FLOAT32_ERROR + rounding * want.abs() * 1.01).all()


# Head sizes: below a register, odd, several registers and a rest. Heads: one for each, shared by an odd number, by all.
# Contexts: none, below and beyond a tile of 64 keys, beyond a span of 512.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 80), (5, 1, 7), (3, 3, 1), (8, 1, 128), (2, 1, 33)], ids=str)
def test_the_result_is_exact_up_to_rounding(
    isa: str, dtype: torch.dtype, block_size: int, heads: tuple[int, int, int]
) -> None:
    inputs = make_inputs([1, 0, 63, 64, 65, 513, 1100, 5], heads, block_size, dtype)
    assert_exact(on_isa(inputs, isa), inputs)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 200), max_size=6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 140),
    st.integers(1, 40), st.sampled_from(DTYPES), st.sampled_from(ISAS or ("",)),
)  # fmt: skip
def test_any_shape_is_exact_up_to_rounding(
    lengths: list[int], kv_heads: int, shared: int, size: int, block_size: int, dtype: torch.dtype, isa: str
) -> None:
    inputs = make_inputs(lengths, (kv_heads * shared, kv_heads, size), block_size, dtype)
    assert_exact(on_isa(inputs, isa), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_exact_up_to_rounding(dtype: torch.dtype) -> None:
    inputs = make_inputs([3, 0, 70], (6, 2, 24), 8, dtype)
    assert_exact(reference.paged_attention(*inputs), inputs)


@pytest.mark.parametrize("isa", ISAS)
def test_neither_threads_nor_other_sequences_change_a_bit(isa: str) -> None:
    inputs = make_inputs([700, 3, 40, 1300], (8, 2, 64), 16)
    want, threads = on_isa(inputs, isa), torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            assert torch.equal(on_isa(inputs, isa), want)
        finally:
            torch.set_num_threads(threads)
    q, keys, values, tables, lengths = inputs
    alone = AttentionInputs(q[2:3], keys, values, tables[2:3], lengths[2:3])
    assert torch.equal(on_isa(alone, isa), want[2:3])


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow_and_what_is_not_a_number_shows(isa: str) -> None:
    inputs = make_inputs([90, 90], (2, 1, 16), 16)
    inputs.q.mul_(300)
    assert_exact(on_isa(inputs, isa), inputs)
    inputs.q[1, 0, 3] = float("nan")
    got = on_isa(inputs, isa)
    assert got[1, 0].isnan().all()
    assert not got[0].isnan().any()
    assert not got[1, 1].isnan().any()


def test_slices_of_a_projection_are_read_and_written_in_place() -> None:
    inputs = make_inputs([9, 30], (4, 2, 16), 8)
    wide = torch.randn(2, 3, 8, 16)
    wide[:, 1, ::2] = inputs.q
    out = torch.zeros(2, 4, 3, 16)
    got = paged_attention(wide[:, 1, ::2], *inputs[1:], out=out[:, :, 1])
    assert torch.equal(got, paged_attention(*inputs))
    assert not out[:, :, [0, 2]].any()


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("q", lambda each: each.double(), "q dtype"),
        ("q", lambda each: each[:, :3], "keys dim 2"),
        ("q", lambda each: each.transpose(1, 2).contiguous().transpose(1, 2), "q stride"),
        ("keys", lambda each: each.half(), "keys dtype"),
        ("keys", lambda each: each.mT.contiguous().mT, "keys strides"),
        ("values", lambda each: each[:-1], "values dim 0"),
        ("block_tables", lambda each: each.long(), "block_tables dtype"),
        ("block_tables", lambda each: each[:1], "block_tables dim 0"),
        ("block_tables", lambda each: each + 100, "block_tables: got block"),
        ("block_tables", lambda each: each.clamp(max=-1), "block_tables: got block -1"),
        ("context_lengths", lambda each: each.int(), "context_lengths dtype"),
        ("context_lengths", lambda each: each + 100, "context_lengths: got"),
        ("context_lengths", lambda each: -each, "context_lengths: got"),
    ],
)
def test_what_breaks_the_contract_is_an_error_that_names_it(name: str, change: Any, named: str) -> None:
    inputs = make_inputs([9, 30], (4, 2, 16), 8)
    broken = inputs._replace(**{name: change(getattr(inputs, name))})
    out = torch.full_like(broken.q, 7.0)
    with pytest.raises(TensorContractError, match=named):
        paged_attention(*broken, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("field", ["block_tables", "context_lengths"])
def test_the_reference_refuses_the_same_pages(field: str) -> None:
    inputs = make_inputs([9, 30], (4, 2, 16), 8)
    broken = inputs._replace(**{field: getattr(inputs, field) + 100})
    with pytest.raises(TensorContractError, match=field):
        reference.paged_attention(*broken)


def test_the_op_is_registered_as_torch_asks() -> None:
    inputs = make_inputs([9, 30], (4, 2, 16), 8)
    # Entries behind a context are -1 and unread.
    torch.library.opcheck(torch.ops.moe_optimizer.paged_attention.default, tuple(inputs))
