"""The product of few tokens with a weight matrix, the CUDA source run thread by thread on the CPU, against torch."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from moe_optimizer.ops.skinny_gemm import MAX_TOKENS
from tests.kernel_emulator import guarded
from tests.skinny_cases import SCALES, assert_multiplied, make_skinny_case, poisoned, result


def run(emulator: ModuleType, call: SkinnyGemm, multiprocessors: int = 2, seed: int = 1) -> SkinnyGemm:
    emulator.cuda_skinny_run(*call.call(multiprocessors), seed)
    return call


# One row; rows that no tile divides; warps without a part of K; several segments and tiles; more stages than there are.
@pytest.mark.parametrize(
    ("tokens", "rows", "depth"), [(1, 1, 32), (1, 35, 512), (2, 133, 96), (4, 19, 4128), (8, 170, 1056), (7, 37, 2080)]
)
def test_matches_the_exact_product_whoever_runs_first(skinny_emulator: ModuleType, tokens, rows, depth):
    call = make_skinny_case(tokens, rows, depth)
    assert_multiplied(run(skinny_emulator, call))
    first = result(call)
    assert torch.equal(first, result(run(skinny_emulator, poisoned(call), seed=7)))


def test_a_token_has_the_same_bits_on_every_gpu_and_beside_any_others(skinny_emulator: ModuleType):
    call = make_skinny_case(8, 50, 640)
    want = result(run(skinny_emulator, call))
    assert torch.equal(want, result(run(skinny_emulator, poisoned(call), multiprocessors=3)))
    alone = call._replace(x=guarded(call.x[5:6]), out=guarded(call.out[5:6]))
    assert torch.equal(want[5:6], result(run(skinny_emulator, poisoned(alone))))


@pytest.mark.parametrize("tokens", [3, 8])
def test_a_bias_is_added_and_rows_may_lie_apart(skinny_emulator: ModuleType, tokens):
    call = make_skinny_case(tokens, 21, 128, bias=True, padding=24)
    around = call.out.as_strided((tokens - 1, 24), (call.out.stride(0), 1), call.out.storage_offset() + 21)
    around.fill_(7)
    assert_multiplied(run(skinny_emulator, call))
    assert (around == 7).all()


def test_a_row_that_is_no_number_shows_in_its_own_output_alone(skinny_emulator: ModuleType):
    call = make_skinny_case(2, 33, 256)
    call.w[7] = float("nan")
    run(skinny_emulator, call)
    assert call.out[:, 7].isnan().all()
    assert call.out.isnan().sum() == 2


def test_all_blocks_have_rows_and_no_more_than_one_fewer_than_another(skinny_emulator: ModuleType):
    fields, multiprocessors = make_skinny_case(1, 5120, 32).call(132)
    found = skinny_emulator.cuda_skinny_layout(fields, multiprocessors)
    assert (found["blocks"], found["threads"]) == (132, 256)
    few = skinny_emulator.cuda_skinny_layout(fields | {"num_rows": 3}, multiprocessors)
    assert few["blocks"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 0}, "T: got 0, expected at least 1"),
        ({"num_tokens": MAX_TOKENS + 1}, f"T: got {MAX_TOKENS + 1}, expected at most {MAX_TOKENS}"),
        ({"depth": 40}, "K: got 40, expected a multiple of 32"),
        ({"num_rows": 0}, "N: got 0, expected at least 1"),
        ({"x_stride": 20}, "elements between tokens of x: got 20, expected a multiple of 8"),
        ({"x": 24}, "address of x: got 24, expected a multiple of 16"),
        ({"w": 24}, "address of w: got 24, expected a multiple of 16"),
    ],
    ids=str,
)
def test_what_no_kernel_covers_is_refused_by_name_and_number(skinny_emulator: ModuleType, change, message):
    fields, multiprocessors = make_skinny_case(2, 64, 64).call(2)
    with pytest.raises(ValueError, match=message):
        skinny_emulator.cuda_skinny_layout(fields | change, multiprocessors)


# One row and one piece; K whose last block of scales is half a block; rows and tiles that cross a block's border; parts
# of K that begin in the middle of a block; several segments.
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("tokens", "rows", "depth"), [(1, 1, 64), (2, 35, 576), (8, 133, 320), (5, 300, 192), (3, 19, 8256), (7, 37, 4160)]
)
def test_e4m3_matches_the_exact_product_whoever_runs_first(skinny_emulator: ModuleType, scales, tokens, rows, depth):
    call = make_skinny_case(tokens, rows, depth, scales=scales, bias=rows == 35)
    assert_multiplied(run(skinny_emulator, call))
    first = result(call)
    assert torch.equal(first, result(run(skinny_emulator, poisoned(call), seed=7)))


@pytest.mark.parametrize("scales", SCALES)
def test_a_token_of_e4m3_has_the_same_bits_on_every_gpu_and_beside_any_others(skinny_emulator: ModuleType, scales):
    call = make_skinny_case(8, 150, 640, scales=scales)
    want = result(run(skinny_emulator, call))
    assert torch.equal(want, result(run(skinny_emulator, poisoned(call), multiprocessors=3)))
    alone = call._replace(x=guarded(call.x[5:6]), out=guarded(call.out[5:6]))
    assert torch.equal(want[5:6], result(run(skinny_emulator, poisoned(alone))))


def test_all_e4m3_numbers_are_exact(skinny_emulator: ModuleType):
    # Each of the 254 codes that are numbers stands in every row, and each token picks one column.
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    w = torch.stack([codes.roll(row) for row in range(16)]).view(torch.float8_e4m3fn)
    for column in range(0, 256, MAX_TOKENS):
        x = torch.zeros(MAX_TOKENS, 256)
        x[range(MAX_TOKENS), range(column, column + MAX_TOKENS)] = 1
        call = make_skinny_case(MAX_TOKENS, 16, 256, scales="tensor")
        call = call._replace(x=guarded(x.bfloat16()), w=guarded(w), scale=guarded(torch.ones(1)))
        run(skinny_emulator, call)
        assert torch.equal(call.out.float(), w.float()[:, column : column + MAX_TOKENS].T)


def test_what_is_no_number_in_e4m3_shows_in_its_own_row_alone(skinny_emulator: ModuleType):
    call = make_skinny_case(2, 33, 256, scales="block")
    call.w.view(torch.uint8)[7, 9] = 0x7F
    run(skinny_emulator, call)
    assert call.out[:, 7].isnan().all()
    assert call.out.isnan().sum() == 2


def test_scales_of_blocks_may_lie_as_a_transposed_matrix_does(skinny_emulator: ModuleType):
    call = make_skinny_case(3, 300, 512, scales="block")
    want = result(run(skinny_emulator, call))
    scale = call.scale
    assert scale is not None
    turned = call._replace(scale=guarded(scale.T.contiguous()).T)
    assert torch.equal(want, result(run(skinny_emulator, poisoned(turned))))


def test_e4m3_takes_whole_pieces_of_64_and_an_unknown_format_is_refused(skinny_emulator: ModuleType):
    fields, multiprocessors = make_skinny_case(2, 64, 128, scales="channel").call(2)
    with pytest.raises(ValueError, match="K: got 96, expected a multiple of 64"):
        skinny_emulator.cuda_skinny_layout(fields | {"depth": 96}, multiprocessors)
    with pytest.raises(ValueError, match="weights: got 3, expected 0 to 2"):
        skinny_emulator.cuda_skinny_layout(fields | {"weights": 3}, multiprocessors)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, MAX_TOKENS),
    rows=st.integers(1, 120),
    pieces=st.integers(1, 40),
    bias=st.booleans(),
    multiprocessors=st.integers(1, 3),
    seed=st.integers(1, 10**6),
    scales=st.sampled_from((None, *SCALES)),
)
def test_any_covered_call_matches_the_exact_product(
    skinny_emulator: ModuleType, tokens, rows, pieces, bias, multiprocessors, seed, scales
):
    columns = 32 if scales is None else 64
    call = make_skinny_case(tokens, rows, columns * pieces, bias=bias, seed=seed, scales=scales)
    assert_multiplied(run(skinny_emulator, call, multiprocessors, seed))
