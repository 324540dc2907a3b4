"""Which numbers of tokens are measured, and which kernels at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from moe_optimizer.measure.kernel_speeds.schedule import family, next_size, without_losers, worth_timing
from moe_optimizer.specs.kernel_speeds import STOCK, TokenSpeeds, kernel_for, token_ranges

Speeds = Callable[[int], Mapping[str, float]]
"""Number of tokens -> times of our kernels, where vLLM's takes 100."""


def row(tokens: int, ours: Mapping[str, float], stock: float = 100.0) -> TokenSpeeds:
    return TokenSpeeds(tokens=tokens, stock_us=stock, ours_us=ours)


def measured(ours: Speeds, device: str = "cuda") -> list[int]:
    """The numbers of tokens in the order in which they are measured."""
    rows: dict[int, TokenSpeeds] = {}
    while (tokens := next_size(device, rows)) is not None:
        assert tokens not in rows
        rows[tokens] = row(tokens, ours(tokens))
    return list(rows)


def test_both_ends_come_first() -> None:
    order = measured(lambda tokens: {"a": 50.0})
    assert order[:3] == [1, 8192, 64]


def test_where_one_kernel_always_wins_not_every_number_is_measured() -> None:
    order = measured(lambda tokens: {"a": 50.0})
    assert len(order) < 14
    gaps = [upper / lower for lower, upper in zip(sorted(order), sorted(order)[1:], strict=False)]
    assert max(gaps) <= 4


def test_where_vllms_always_wins_clearly_fewer_still_are_measured() -> None:
    assert len(measured(lambda tokens: {"a": 150.0})) <= 6


@pytest.mark.parametrize("crossing", [3, 24, 200, 1500, 6000])
def test_a_crossing_of_two_kernels_is_closed_in_to_neighbouring_numbers(crossing: int) -> None:
    order = sorted(measured(lambda tokens: {"a": 50.0, "b": 90.0} if tokens < crossing else {"a": 90.0, "b": 50.0}))
    lower, upper = max(n for n in order if n < crossing), min(n for n in order if n >= crossing)
    assert upper == 2 * lower


@pytest.mark.parametrize("crossing", [3, 24, 200, 1500, 6000])
def test_a_gain_that_begins_somewhere_is_used_from_the_next_measured_number_on(crossing: int) -> None:
    def ours(tokens: int) -> dict[str, float]:
        return {"a": 120.0 if tokens < crossing else 50.0}

    ranges = token_ranges([row(tokens, ours(tokens)) for tokens in sorted(measured(ours))])
    assert kernel_for(ranges, 8192) == "a"
    assert kernel_for(ranges, min(8192, 2 * crossing)) == "a"
    assert kernel_for(ranges, crossing // 2) == STOCK


def test_what_was_measured_before_is_not_measured_again() -> None:
    rows = {tokens: row(tokens, {"a": 50.0}) for tokens in (1, 8192, 64)}
    assert next_size("cuda", rows) == 512


def test_on_a_processor_a_clear_loss_ends_the_measurement() -> None:
    assert measured(lambda tokens: {"k": 120.0}, "cpu") == [1]
    assert measured(lambda tokens: {"k": 99.0}, "cpu") == [1, 256, 16, 4, 64]


def test_a_family_that_lost_at_both_neighbours_is_not_timed_between() -> None:
    rows = {
        64: row(64, {"grouped-fp8-n32": 50.0, "grouped-fp8_weights-n16": 80.0}),
        512: row(512, {"grouped-fp8-n64": 50.0}),
    }
    names = ("grouped-fp8_weights-n32", "grouped-fp8-n32", "grouped-fp8-n144x2", "direct")
    assert worth_timing(names, 128, rows) == ("grouped-fp8-n32",)
    assert worth_timing(names, 1024, rows) == names
    assert worth_timing(("direct",), 128, rows) == ("direct",)


def test_a_family_that_came_near_at_one_neighbour_is_timed() -> None:
    rows = {8: row(8, {"direct": 50.0}), 64: row(64, {"grouped-bf16-n32": 50.0})}
    names = ("direct", "grouped-bf16-n16")
    assert worth_timing(names, 16, rows) == names


def test_after_a_first_sample_losers_are_left_out_but_never_vllms_and_the_best_of_ours() -> None:
    assert without_losers({STOCK: 100.0, "a": 50.0, "b": 60.0, "c": 70.0}) == (STOCK, "a", "b")
    assert without_losers({STOCK: 100.0, "a": 300.0, "b": 400.0}) == (STOCK, "a")
    assert without_losers({STOCK: 100.0}) == (STOCK,)


def test_tiles_of_a_kernel_are_one_family_and_paired_ones_another() -> None:
    assert family("grouped-bf16-n16") == family("grouped-bf16-n128") == "grouped-bf16"
    assert family("grouped-bf16-n160x2") != family("grouped-bf16-n160")
    assert family("direct") == "direct"
