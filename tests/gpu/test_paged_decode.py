"""Attention of few new tokens to a paged cache on a GPU: right, deterministic, capturable, chained.

Timing lives in benchmarks/ops/bench_cuda_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moe_optimizer.ops import paged_decode
from moe_optimizer.ops.kernel_arguments import PagedDecode
from moe_optimizer.ops.paged_decode import MAX_TOKENS, plain, run_kernel, why_no_kernel
from tests.decode_cases import assert_attended, make_decode_case, poisoned, result

pytestmark = pytest.mark.gpu


def case(lengths: Sequence[int], **options: Any) -> PagedDecode:
    shape: dict[str, Any] = {"heads": 32, "kv_heads": 4, "size": 128}
    return make_decode_case(lengths, device="cuda", **shape | options)


def run(call: PagedDecode) -> PagedDecode:
    """Errors of the launch surface here."""
    assert why_no_kernel(call) is None
    run_kernel(call)
    torch.cuda.synchronize()
    return call


@pytest.mark.parametrize(
    "lengths",
    [[1], [16], [17], [640], [4096], [20000], [640, 641], [3, 5000, 0, 64, 1], list(range(100, 900, 100))],
    ids=str,
)
@pytest.mark.parametrize("size", [64, 128])
def test_matches_the_exact_result_with_the_same_bits_every_time(lengths, size):
    call = case(lengths, size=size)
    assert_attended(run(call))
    first = result(call)
    for _ in range(20):
        assert torch.equal(first, result(run(poisoned(call))))


@pytest.mark.parametrize("queries", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_any_number_of_query_heads_of_a_kv_head(queries, kv_heads):
    for lengths in ([640], [90, 1000, 33]):
        assert_attended(run(case(lengths, heads=queries * kv_heads, kv_heads=kv_heads)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_both_layouts_of_vllms_cache(layout, block_size):
    assert_attended(run(case([block_size, 700, 2 * block_size + 1], layout=layout, block_size=block_size, padding=64)))


def test_padding_rows_of_a_captured_graph_are_zero():
    call = run(case([0, 700, 0, 0]))
    assert_attended(call)
    assert (call.out[[0, 2, 3]] == 0).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("size", [64, 128])
def test_new_keys_are_read_where_the_model_made_them_and_stored_in_the_cache(layout, size):
    call = case([640, 0, 64, 1, 4000], size=size, layout=layout, padding=64, new=True)
    assert call.slots is not None
    before = call.cache.clone()
    want = plain(call._replace(cache=before))
    run(call)
    assert torch.equal(call.cache, before)  # nothing else was written
    assert_attended(call)
    assert torch.allclose(call.out.float(), want.float(), rtol=2.0**-6, atol=2.0**-6)
    call.slots.fill_(-1)
    run(call._replace(cache=before.fill_(1)))
    assert (before == 1).all()


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_one_captured_graph_of_many_layers_serves_growing_contexts(tokens):
    # As in a decode step: each layer's new key and query are written by the launches before its attention, in the cache
    # or, of every other layer, where the kernel takes it from. The last of them is a kernel, not a copy: only beside a
    # kernel does ours start early. The graph is captured at length 1.
    lengths, most, layers = torch.ones(tokens, dtype=torch.int32, device="cuda"), 900, 6
    calls = [case([most] * tokens, seed=seed)._replace(lengths=lengths) for seed in range(layers)]
    full = [call.cache.clone() for call in calls]
    queries = [call.q.clone() for call in calls]
    rows = torch.arange(tokens, device="cuda")
    made = [torch.empty(tokens, 4, 256, device="cuda", dtype=torch.bfloat16) for _ in calls]
    slots = torch.full((tokens,), -1, device="cuda")

    def forward() -> None:
        for layer, (call, cache, query, new) in enumerate(zip(calls, full, queries, made, strict=True)):
            last = lengths.long() - 1
            blocks, places = call.block_table[rows, last // 16].long(), last % 16
            if layer % 2:
                slots.copy_(blocks * 16 + places)
                torch.mul(query, 1, out=call.q)
                torch.mul(cache[blocks, :, places], 1, out=new)
                run_kernel(call._replace(new_keys=new[..., :128], new_values=new[..., 128:], slots=slots))
            else:
                torch.mul(query, 1, out=call.q)
                call.cache[blocks, :, places] = cache[blocks, :, places]
                run_kernel(call)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    for length in (1, 2, 15, 16, 17, 128, 640, most):
        lengths.copy_(torch.tensor([max(length - 7 * row, 1) for row in range(tokens)]))
        for call, cache in zip(calls, full, strict=True):
            call.cache.copy_(cache)
            for row, count in enumerate(lengths.tolist()):
                # Not there before the graph writes it.
                call.cache[int(call.block_table[row, (count - 1) // 16]), :, (count - 1) % 16] = float("nan")
            call.q.fill_(float("nan"))
            poisoned(call)
        graph.replay()
        torch.cuda.synchronize()
        for call in calls:
            assert_attended(call)


@pytest.mark.parametrize("tokens", [0, 1, MAX_TOKENS, MAX_TOKENS + 1])
def test_the_op_takes_any_number_of_requests(tokens):
    call = case([100] * max(tokens, 1))
    out = paged_decode(
        call.q[:tokens], call.cache, call.block_table[:tokens], call.lengths[:tokens], scale=call.scale
    )  # fmt: skip
    assert out.shape == (tokens, 32, 128)
    if tokens:
        assert_attended(call._replace(out=out))


def test_the_registered_op_passes_torchs_checks():
    for new in (False, True):
        torch.library.opcheck(torch.ops.moe_optimizer.paged_decode_out.default, tuple(case([100, 7], new=new)))


def test_plain_torch_computes_the_same_up_to_rounding():
    call = run(case([300, 20]))
    assert torch.allclose(call.out.float(), plain(call).float(), rtol=2.0**-6, atol=2.0**-6)


def test_what_no_kernel_covers_is_refused_with_the_reason():
    changes = {
        "64 or 128": case([20], size=32),
        "at least 16": case([20], block_size=8),
        "multiple of 16": case([20], block_size=24),
        "at most 16": case([20], heads=34, kv_heads=2),
        "at most 8": case([20] * 9),
    }
    for reason, changed in changes.items():
        assert reason in (why_no_kernel(changed) or "")
