"""Attention of few new tokens to the paged cache, the CUDA source run thread by thread on the CPU, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.paged_decode import MAX_QUERIES_PER_KV_HEAD, MAX_TOKENS
from tests.decode_cases import assert_attended, make_decode_case, poisoned, result
from tests.kernel_emulator import guarded


def run(
    emulator: ModuleType, call: PagedDecode, multiprocessors: int = 4, seed: int = 1, writes: Sequence[Any] = ()
) -> PagedDecode:
    """Run it with a workspace of NaN, and check that it leaves its words zero.

    Args:
        emulator: has the kernel.
        call: is computed into its output.
        multiprocessors: of the GPU.
        seed: of the order in which threads run and copies land.
        writes: addresses and bytes that the launch before this one writes, which still runs: (to, from, bytes).
    """
    fields, _ = call.call(multiprocessors)
    # Whole 16 bytes, as the kernel stores so many at once and a guarded tensor begins where its size says.
    count = -(-emulator.cuda_decode_layout(fields, multiprocessors)["workspace_bytes"] // 16) * 4
    workspace = guarded(torch.full((count,), float("nan")))
    arrived = guarded(torch.zeros(call.cache.shape[1] * call.q.shape[0], dtype=torch.int32))
    emulator.cuda_decode_run(*call.call(multiprocessors, workspace.data_ptr(), arrived.data_ptr()), seed, list(writes))
    assert not arrived.any()
    return call


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("size", [64, 128])
def test_any_length_matches_the_exact_result(decode_emulator: ModuleType, length, size):
    assert_attended(run(decode_emulator, make_decode_case([length], size=size, seed=length)))


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("size", [64, 128])
def test_any_number_of_query_heads_of_a_kv_head(decode_emulator: ModuleType, heads, size):
    assert_attended(run(decode_emulator, make_decode_case([90, 7], heads=heads, size=size)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_both_layouts_of_vllms_cache_with_several_kv_heads(decode_emulator: ModuleType, layout, block_size):
    # Lengths that end before, at and behind a block's end.
    case = make_decode_case([block_size - 1, 3 * block_size, 2 * block_size + 1], heads=12, kv_heads=3, layout=layout,
                            block_size=block_size)  # fmt: skip
    assert_attended(run(decode_emulator, case))


def test_padding_rows_of_a_captured_graph_are_zero_and_disturb_no_other(decode_emulator: ModuleType):
    call = run(decode_emulator, make_decode_case([0, 130, 0, 1], heads=4, kv_heads=2))
    assert_attended(call)
    assert (call.out[[0, 2]] == 0).all()
    assert (run(decode_emulator, make_decode_case([0, 0], heads=4, kv_heads=2)).out == 0).all()


@pytest.mark.parametrize(
    ("lengths", "multiprocessors"),
    [([700], 8), ([640, 5, 90], 7), ([33] * MAX_TOKENS, 1), ([1, 400, 1, 1, 1, 1, 1, 250], 9)],
)
def test_the_same_bits_whichever_block_is_last(decode_emulator: ModuleType, lengths, multiprocessors):
    call = make_decode_case(lengths, heads=16, kv_heads=2)
    assert_attended(run(decode_emulator, call, multiprocessors))
    want = result(call)
    for seed in (7, 23):
        assert torch.equal(want, result(run(decode_emulator, poisoned(call), multiprocessors, seed)))


def test_more_parts_than_one_merge_holds_and_more_units_than_a_warp_knows_pages_of(decode_emulator: ModuleType):
    # 11 parts of one KV head, of which a merge keeps 8 in flight; then 34 units for each warp of one block.
    assert_attended(run(decode_emulator, make_decode_case([700]), multiprocessors=64))
    assert_attended(run(decode_emulator, make_decode_case([2170, 1], heads=1), multiprocessors=1))


def test_one_key_may_have_all_the_weight_wherever_it_is(decode_emulator: ModuleType):
    # Sharp scores: a wrong maximum, or one of another row, shows.
    for seed in range(4):
        assert_attended(run(decode_emulator, make_decode_case([150], heads=16, sharpness=60.0, seed=seed)))


def test_values_tell_keys_apart(decode_emulator: ModuleType):
    # All keys alike, each value a number of its own: the mean, which a key left out or taken twice moves.
    call = make_decode_case([97], heads=2)
    count, size = call.cache.shape[2], call.q.shape[2]
    for i in range(97):
        row = call.cache[int(call.block_table[0, i // count]), 0, i % count]
        row[:size], row[size:] = 1.0, float(i)
    assert torch.allclose(run(decode_emulator, call).out.float(), torch.tensor(48.0), rtol=2.0**-7)


def test_a_key_that_is_no_number_shows_in_its_own_request_and_heads_alone(decode_emulator: ModuleType):
    call = make_decode_case([150, 40], heads=4, kv_heads=2)
    call.cache[int(call.block_table[0, 3]), 1, 5, 0] = float("nan")
    run(decode_emulator, call)
    assert call.out[0, 2:].isnan().all()
    assert call.out.isnan().sum() == call.out[0, 2:].numel()


def test_tokens_may_lie_apart_and_what_lies_between_stays(decode_emulator: ModuleType):
    call = make_decode_case([30, 99, 12], heads=4, padding=24)
    around = call.out.as_strided((2, 24), (call.out.stride(0), 1), call.out.storage_offset() + 4 * 64)
    around.fill_(7)
    assert_attended(run(decode_emulator, call))
    assert (around == 7).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("size", [64, 128])
def test_new_keys_are_read_where_the_model_made_them_and_stored_in_the_cache(decode_emulator: ModuleType, layout, size):
    lengths = [1, 0, 64, 133, 17]
    call = make_decode_case(lengths, heads=6, kv_heads=2, size=size, layout=layout, block_size=32, padding=8, new=True)
    assert call.new_keys is not None
    assert call.new_values is not None
    assert call.slots is not None
    before = call.cache.clone()
    run(decode_emulator, call)
    there = call.slots >= 0
    slots = call.slots[there]
    before[slots // 32, :, slots % 32] = torch.cat((call.new_keys, call.new_values), -1)[there]
    assert torch.equal(call.cache, before)  # nothing else was written
    assert_attended(call)
    first = result(call)
    assert torch.equal(first, result(run(decode_emulator, poisoned(call), seed=5)))


def test_a_negative_slot_stores_nothing(decode_emulator: ModuleType):
    # As in the dummy steps by which vLLM captures graphs.
    call = make_decode_case([40, 1], new=True)
    assert call.slots is not None
    call.slots.fill_(-1)
    before = call.cache.clone()
    run(decode_emulator, call)
    assert torch.equal(call.cache, before)
    assert not call.out.isnan().any()


@pytest.mark.parametrize("lengths", [[1], [160, 16, 200, 33]], ids=str)
def test_the_launch_before_may_still_make_what_is_new(decode_emulator: ModuleType, lengths):
    for seed in range(1, 5):
        call = make_decode_case(lengths, heads=4, kv_heads=2, new=True, seed=seed)
        assert call.new_keys is not None
        assert call.new_values is not None
        late = [call.q, *call.new_keys, *call.new_values]
        values = [each.clone().contiguous() for each in late]
        # Heads of a key are neighbours, and so are all of q's.
        writes = [(to.data_ptr(), new.data_ptr(), 2 * new.numel()) for to, new in zip(late, values, strict=True)]
        for each in late:
            each.fill_(float("nan"))
        assert_attended(run(decode_emulator, call, seed=seed, writes=writes))


@pytest.mark.parametrize("lengths", [[1], [160, 16, 200, 33]], ids=str)
def test_the_launch_before_may_still_write_queries_and_new_keys(decode_emulator: ModuleType, lengths):
    for seed in range(1, 5):
        call = make_decode_case(lengths, heads=4, kv_heads=2, seed=seed)
        late = [call.q]
        for row, length in enumerate(lengths):
            block = int(call.block_table[row, (length - 1) // call.cache.shape[2]])
            late += [call.cache[block, head, (length - 1) % call.cache.shape[2]] for head in range(2)]
        values = [each.clone().contiguous() for each in late]
        writes = [(to.data_ptr(), new.data_ptr(), 2 * new.numel()) for to, new in zip(late, values, strict=True)]
        for each in late:
            each.fill_(float("nan"))
        assert_attended(run(decode_emulator, call, seed=seed, writes=writes))
        assert torch.equal(call.q, values[0])  # the writes were made


def test_the_grid_fills_the_gpu_and_does_not_depend_on_lengths(decode_emulator: ModuleType):
    def blocks(tokens: int, heads: int, kv_heads: int) -> int:
        fields, _ = make_decode_case([1] * tokens, heads=heads, kv_heads=kv_heads, size=128).call(132)
        found = decode_emulator.cuda_decode_layout(fields, 132)
        assert found["threads"] == 128
        return found["blocks"]

    assert [blocks(tokens, 32, 4) for tokens in (1, 2, 8)] == [264, 264, 264]
    assert blocks(1, 8, 1) == 264
    assert blocks(8, 64, 64) == 8 * 64  # a block for each request and KV head at least


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 0}, "T: got 0, expected at least 1"),
        ({"num_tokens": MAX_TOKENS + 1}, f"T: got {MAX_TOKENS + 1}, expected at most {MAX_TOKENS}"),
        ({"head_size": 96}, "d: got 96, expected 64 or 128"),
        ({"num_heads": 9, "num_kv_heads": 2}, "H: got 9, expected a multiple of 2"),
        ({"num_kv_heads": 0}, "K: got 0, expected at least 1"),
        (
            {"num_heads": MAX_QUERIES_PER_KV_HEAD + 1},
            f"H / K: got {MAX_QUERIES_PER_KV_HEAD + 1}, expected at most {MAX_QUERIES_PER_KV_HEAD}",
        ),
        ({"block_size": 24}, "keys of a block: got 24, expected a multiple of 16"),
        ({"q_stride": 7}, "elements between tokens of q: got 7, expected a multiple of 2"),
        ({"key_stride": 132}, "elements between keys of the cache: got 132, expected a multiple of 8"),
        ({"cache": 24}, "address of the cache: got 24, expected a multiple of 16"),
        ({"out": 4}, "address of the output: got 4, expected a multiple of 8"),
        ({"new_keys": 8}, "address of new_keys: got 8, expected a multiple of 16"),
        ({"new_keys": 16, "new_value_stride": 12}, "tokens of new_values: got 12, expected a multiple of 8"),
    ],
    ids=str,
)
def test_what_no_kernel_covers_is_refused_by_name_and_number(decode_emulator: ModuleType, change, message):
    fields, multiprocessors = make_decode_case([3, 40]).call(4)
    with pytest.raises(ValueError, match=message):
        decode_emulator.cuda_decode_layout(fields | change, multiprocessors)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 260), min_size=1, max_size=MAX_TOKENS),
    queries=st.integers(1, MAX_QUERIES_PER_KV_HEAD),
    kv_heads=st.integers(1, 3),
    size=st.sampled_from([64, 128]),
    block_size=st.sampled_from([16, 32, 80]),
    layout=st.sampled_from(["NHD", "HND"]),
    multiprocessors=st.integers(1, 12),
    new=st.booleans(),
    seed=st.integers(1, 10**6),
)
def test_any_covered_call_matches_the_exact_result(
    decode_emulator: ModuleType, lengths, queries, kv_heads, multiprocessors, seed, **options: Any
):
    call = make_decode_case(lengths, heads=queries * kv_heads, kv_heads=kv_heads, seed=seed, **options)
    assert_attended(run(decode_emulator, call, multiprocessors, seed))
