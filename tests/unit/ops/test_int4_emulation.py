"""The CUDA kernels of INT4 weights, their source run thread by thread on the CPU: see test_launch_emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.ops.cuda_variants import DirectVariant, GemmMode, GroupedVariant, MoeSizes, choose_variant
from tests.kernel_emulator import Case, Emulator, assert_close, make_case, with_poisoned_output

MODE = GemmMode.INT4_WEIGHTS


def both(emulator: Emulator, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the direct and of the grouped kernels."""
    direct = emulator.direct(with_poisoned_output(case)).clone()
    return direct, emulator.grouped(with_poisoned_output(case), MODE, tile_tokens=16)


# One group along K; parts of 128 and of 256; rows whose scales and zero points start at any place of a word; one matrix
# wide at a time.
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    ("group", "tokens", "hidden", "width"),
    [
        (32, 1, 64, 32), (32, 3, 288, 96), (64, 40, 192, 128), (128, 2, 640, 128), (128, 2, 128, 384),
        (32, 2, 1056, 96), (32, 2, 96, 544),
    ],
    ids=str,
)  # fmt: skip
def test_direct_matches_the_reference_whoever_runs_first(emulator: Emulator, group, tokens, hidden, width, zero_points):
    case = make_case(tokens, 2, 4, hidden, width, int4=group, zero_points=zero_points)
    one = emulator.direct(case.problem, blocks=1).clone()
    assert_close(case, one)
    assert torch.equal(one, emulator.direct(with_poisoned_output(case), seed=7))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    ("group", "hidden", "width"),
    [(32, 32, 32), (32, 288, 160), (64, 320, 64), (64, 64, 576), (128, 384, 128), (128, 640, 128), (128, 128, 384)],
    ids=str,
)
@pytest.mark.parametrize("tile", [16, 64])
def test_grouped_matches_the_reference(emulator: Emulator, tile, group, hidden, width, zero_points):
    case = make_case(24, 2, 3, hidden, width, int4=group, zero_points=zero_points)
    assert_close(case, emulator.grouped(case.problem, MODE, tile_tokens=tile))


@pytest.mark.parametrize("count", [1, 64, 65, 96, 97, 112, 113, 128])
def test_grouped_tiles_of_any_fill_match_the_reference(emulator: Emulator, count):
    case = make_case(count, 1, 1, 96, 64, int4=32, zero_points=True)
    assert_close(case, emulator.grouped(case.problem, MODE, tile_tokens=128, blocks=1))


def test_grouped_with_the_smallest_rings_ends(emulator: Emulator):
    case = make_case(20, 2, 3, 576, 320, int4=64, zero_points=True)
    full = emulator.grouped(case.problem, MODE, tile_tokens=16).clone()
    for stages in (1, 2):
        small = emulator.grouped(with_poisoned_output(case), MODE, tile_tokens=16, num_stages=stages, seed=stages)
        assert torch.equal(full, small)


@pytest.mark.parametrize("group", [32, 64])
def test_biases_the_clamped_activation_and_a_map(emulator: Emulator, group):
    # The rows of the gate alternate with those of up: the phases of their groups differ.
    ids = torch.randint(-1, 6, (20, 2), generator=torch.Generator().manual_seed(3))
    expert_map = torch.tensor([-1, 1, -1, 0, 2, 3])
    case = make_case(
        20, 2, 4, 192 if group == 64 else 96, 192, int4=group, zero_points=True, ids=ids, expert_map=expert_map,
        activation="swigluoai", bias=True, int64_ids=True,
    )  # fmt: skip
    for out in both(emulator, case):
        assert_close(case, out)


def test_groups_of_the_two_weights_may_differ(emulator: Emulator):
    case, other = (make_case(9, 2, 3, 256, 192, int4=group, zero_points=True) for group in (128, 64))
    problem = replace(case.problem, w2=other.problem.w2, w2_scale=other.problem.w2_scale, w2_zero=other.problem.w2_zero)
    mixed = Case(problem)
    for out in both(emulator, mixed):
        assert_close(mixed, out)


@pytest.mark.parametrize("zero", range(16))
def test_every_code_less_every_zero_point_is_exact_and_its_product_rounded_once(emulator: Emulator, zero):
    for scale in (1.0, 0.0078125, 1.0078125, 0.00341796875, 1e-30):
        bits = int(torch.tensor(scale).bfloat16().view(torch.int16)) & 0xFFFF
        for codes in (0x76543210, 0xFEDCBA98):
            integers = [(codes >> 4 * i & 15) - zero for i in range(8)]
            want = (torch.tensor(integers) * torch.tensor(scale).bfloat16().float()).bfloat16()
            assert emulator.module.int4_values(codes, bits, zero) == want.tolist()


def test_a_scale_that_is_no_number_shows_in_its_row_alone(emulator: Emulator):
    # Three groups along K of w2: those of the next row lie behind them in the same words.
    case = make_case(3, 2, 2, 64, 96, int4=32, zero_points=True)
    assert case.problem.w2_scale is not None
    case.problem.w2_scale[:, 1::2] = float("nan")
    for out in both(emulator, case):
        assert not out[:, 1::2].isfinite().any()
        assert out[:, ::2].isfinite().all()


@pytest.mark.parametrize(("hidden", "width", "name"), [(96, 128, "H"), (128, 96, "I")])
def test_sizes_that_are_no_multiple_of_the_group_are_refused(emulator: Emulator, hidden, width, name):
    problem = make_case(3, 2, 2, 128, 128, int4=64).problem
    fields: list[Any] = list(problem.call(DirectVariant(), 2))
    fields[0] |= {"hidden_size": hidden, "intermediate_size": width}
    with pytest.raises(ValueError, match=f"{name}: got 96, expected a multiple of 64"):
        emulator.module.cuda_layout(*fields, 0)


@pytest.mark.parametrize("group", [0, 16, 48, 256])
def test_other_groups_are_refused(emulator: Emulator, group):
    fields: list[Any] = list(make_case(3, 2, 2, 256, 256, int4=32).problem.call(DirectVariant(), 2))
    fields[2] |= {"w2_group": group}
    with pytest.raises(ValueError, match=f"got {group}, expected 32, 64 or 128"):
        emulator.module.cuda_layout(*fields, 0)


def test_mxfp4_and_int4_do_not_take_each_others_kernels(emulator: Emulator):
    integers, floats = make_case(3, 2, 4, 64, 32, int4=32).problem, make_case(3, 2, 4, 64, 32, mxfp4=True).problem
    for problem, mode in ((integers, GemmMode.MXFP4_WEIGHTS), (floats, MODE)):
        with pytest.raises(ValueError, match="4-bit weights"):
            emulator.layout(problem, GroupedVariant(mode), 2)


def test_the_variant_by_sizes_reads_integers():
    sizes = MoeSizes(num_tokens=300, top_k=8, num_experts=128, hidden_size=2048, intermediate_size=768, weight_bits=4)
    assert choose_variant(replace(sizes, int4=True)) == GroupedVariant(MODE)
    assert choose_variant(sizes) == GroupedVariant(GemmMode.MXFP4_WEIGHTS)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 6),
    group=st.sampled_from([32, 64, 128]),
    hidden=st.integers(1, 5),
    width=st.integers(1, 5),
    zero_points=st.booleans(),
    activation=st.sampled_from(["silu", "swigluoai"]),
    seed=st.integers(1, 10**6),
    data=st.data(),
)
def test_any_covered_shape_and_routing_matches_the_reference(
    emulator: Emulator, tokens, experts, group, hidden, width, zero_points, activation, seed, data
):
    top_k = data.draw(st.integers(1, 3))
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
    case = make_case(
        tokens, top_k, experts, group * hidden, group * width, int4=group, zero_points=zero_points, ids=ids,
        activation=activation, seed=seed,
    )  # fmt: skip
    assert_close(case, emulator.direct(case.problem, blocks=data.draw(st.integers(1, 3)), seed=seed))
    problem = with_poisoned_output(case)
    assert_close(case, emulator.grouped(problem, MODE, blocks=data.draw(st.integers(1, 3)), seed=seed))
