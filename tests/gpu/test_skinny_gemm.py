"""The product of few tokens with a weight matrix on a GPU: right, deterministic, capturable, chained.

Timing lives in benchmarks/ops/bench_cuda_linears.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_optimizer.ops import skinny_gemm
from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from moe_optimizer.ops.skinny_gemm import MAX_TOKENS, run_kernel, why_no_kernel
from tests.skinny_cases import SCALES, assert_multiplied, make_skinny_case, poisoned, result

pytestmark = pytest.mark.gpu


def case(tokens: int, rows: int, depth: int, **options: Any) -> SkinnyGemm:
    return make_skinny_case(tokens, rows, depth, device="cuda", **options)


def run(call: SkinnyGemm) -> SkinnyGemm:
    """Errors of the launch surface here."""
    assert why_no_kernel(call) is None
    run_kernel(call)
    torch.cuda.synchronize()
    return call


# Fewer rows than multiprocessors; rows that no tile divides; parts of K of one piece and none; gpt-oss; a head.
@pytest.mark.parametrize(
    ("tokens", "rows", "depth"),
    [(1, 5120, 2048), (8, 2048, 4096), (6, 5120, 2880), (3, 33, 32), (7, 4099, 160), (5, 2048, 12288),
     (2, 32003, 1024)],
)  # fmt: skip
def test_matches_the_exact_product_with_the_same_bits_every_time(tokens, rows, depth):
    call = case(tokens, rows, depth)
    assert_multiplied(run(call))
    first = result(call)
    for _ in range(10):
        assert torch.equal(first, result(run(poisoned(call))))


# The same, and blocks of scales: a last one of half a block of K, rows and tiles that cross their borders.
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("tokens", "rows", "depth"),
    [
        (1, 5120, 2048),
        (8, 2048, 4096),
        (6, 5120, 2880),
        (3, 33, 64),
        (7, 4099, 320),
        (5, 2048, 12288),
        (2, 32003, 1024),
    ],
)
def test_e4m3_matches_the_exact_product_with_the_same_bits_every_time(tokens, rows, depth, scales):
    call = case(tokens, rows, depth, scales=scales)
    assert_multiplied(run(call))
    first = result(call)
    for _ in range(10):
        assert torch.equal(first, result(run(poisoned(call))))


def test_all_e4m3_numbers_are_exact():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    w = torch.stack([codes.roll(row) for row in range(256)]).cuda().view(torch.float8_e4m3fn)
    for column in range(0, 256, MAX_TOKENS):
        x = torch.zeros(MAX_TOKENS, 256, device="cuda", dtype=torch.bfloat16)
        x[range(MAX_TOKENS), range(column, column + MAX_TOKENS)] = 1
        call = case(MAX_TOKENS, 256, 256, scales="tensor")._replace(x=x, w=w, scale=torch.ones(1, device="cuda"))
        assert torch.equal(run(call).out.float(), w.float()[:, column : column + MAX_TOKENS].T)


def test_what_is_no_number_in_e4m3_shows_in_its_own_row_alone():
    call = case(2, 333, 256, scales="block")
    call.w.view(torch.uint8)[7, 9] = 0x7F
    run(call)
    assert call.out[:, 7].isnan().all()
    assert call.out.isnan().sum() == 2


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", range(1, MAX_TOKENS + 1))
def test_e4m3_every_number_of_tokens_matches_and_a_token_has_the_same_bits_beside_any_others(tokens, scales):
    call = case(tokens, 640, 2048, bias=True, seed=tokens, scales=scales)
    assert_multiplied(run(call))
    alone = call._replace(x=call.x[-1:].clone(), out=torch.empty_like(call.out[-1:]))
    assert torch.equal(call.out[-1:], run(alone).out)


@pytest.mark.parametrize("tokens", range(1, MAX_TOKENS + 1))
def test_every_number_of_tokens_matches_and_a_token_has_the_same_bits_beside_any_others(tokens):
    call = case(tokens, 640, 2048, bias=True, seed=tokens)
    assert_multiplied(run(call))
    alone = call._replace(x=call.x[-1:].clone(), out=torch.empty_like(call.out[-1:]))
    assert torch.equal(call.out[-1:], run(alone).out)


@pytest.mark.parametrize("tokens", [4, 7])
def test_rows_may_lie_apart_and_what_lies_between_stays(tokens):
    call = case(tokens, 333, 512, padding=24)
    around = call.out.as_strided((tokens - 1, 24), (call.out.stride(0), 1), call.out.storage_offset() + 333)
    around.fill_(7)
    assert_multiplied(run(call))
    assert (around == 7).all()


@pytest.mark.parametrize("scales", [None, *SCALES])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_captured_graph_of_many_layers_follows_its_inputs(tokens, scales):
    # Each product's x is made by the launch before it, or is what the product before it wrote; every launch overlaps
    # its neighbours.
    shapes = ((2048, 1024), (512, 2048), (2048, 512))
    calls = [case(tokens, *shape, seed=seed, scales=scales) for seed, shape in enumerate(shapes, start=1)]
    chained = [calls[0]]
    for call in calls[1:]:
        chained.append(call._replace(x=chained[-1].out))
    source = torch.randn_like(calls[0].x)

    def forward() -> None:
        torch.mul(source, 0.5, out=calls[0].x)
        for call in chained:
            run_kernel(call)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            forward()
    for _ in range(30):
        source.normal_()
        for call in chained:
            poisoned(call)
        graph.replay()
        torch.cuda.synchronize()
        found = [result(call) for call in chained]
        assert torch.equal(calls[0].x, source * 0.5)
        for index, call in enumerate(chained):  # one after the other, nothing overlapping
            assert_multiplied(call)
            assert torch.equal(found[index], result(run(call)))


@pytest.mark.parametrize("scales", [None, *SCALES])
@pytest.mark.parametrize("tokens", [0, 1, MAX_TOKENS, MAX_TOKENS + 1])
def test_the_op_takes_any_number_of_tokens(tokens, scales):
    call = case(max(tokens, 1), 256, 512, bias=True, scales=scales)
    x = call.x[:tokens]
    out = skinny_gemm(x, call.w, call.bias, scale=call.scale)
    assert out.shape == (tokens, 256)
    plain = skinny_gemm(x, call.w, call.bias, scale=call.scale, max_tokens=0)
    if tokens:
        assert_multiplied(call._replace(out=out))
        assert_multiplied(call._replace(out=plain))


def test_the_registered_op_passes_torchs_checks():
    call = case(4, 128, 256, bias=True)
    for bias in (call.bias, None):
        arguments = (call.x, call.w, bias, None, 8)
        torch.library.opcheck(torch.ops.moe_optimizer.skinny_gemm.default, arguments)


def test_what_no_kernel_covers_is_refused_with_the_reason():
    call = case(2, 128, 256)
    changes = {
        "multiple of 32": call._replace(x=call.x[:, :248], w=call.w[:, :248].contiguous()),
        "contiguous": call._replace(x=call.x[:, :224], w=call.w[:, :224]),
        "float32": call._replace(x=call.x.float(), w=call.w.float()),
        "at most 8": case(9, 128, 256),
        "multiple of 64": case(2, 128, 96, scales="block"),
    }
    for reason, changed in changes.items():
        assert reason in (why_no_kernel(changed) or "")
