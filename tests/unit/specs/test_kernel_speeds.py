"""From measured times to which kernel runs how many tokens."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.specs.kernel_speeds import (
    ANY_NUMBER,
    STOCK,
    KernelSpeeds,
    SpeedQuestion,
    SpeedTables,
    TokenRange,
    TokenSpeeds,
    fastest_ranges,
    kernel_for,
    never_slower,
    ours_never_slower,
    token_ranges,
)
from tests.builders import QWEN_LAYER, kernel_speeds

QUESTION = SpeedQuestion(device="NVIDIA H200", weights="bf16", shape=QWEN_LAYER, kernel_hash="abc", vllm="0.26.0")


def row(tokens: int, **times: float) -> TokenSpeeds:
    stock = times.pop("stock", 100.0)
    return TokenSpeeds(tokens=tokens, stock_us=stock, ours_us=times)


def table(**changes: Any) -> KernelSpeeds:
    asked = {name: getattr(QUESTION, name) for name in ("device", "weights", "shape", "kernel_hash", "vllm")}
    return kernel_speeds(**({"rows": (row(1, direct=90.0),)} | asked | changes))


def uses(*rows: TokenSpeeds) -> list[tuple[int, str]]:
    return [(each.up_to, each.use) for each in token_ranges(rows)]


def test_a_variant_is_used_between_two_numbers_of_tokens_at_which_it_is_faster():
    assert uses(row(1, direct=90.0), row(8, direct=95.0), row(16, direct=120.0)) == [(8, "direct")]


def test_a_gain_within_the_margin_is_none():
    assert uses(row(1, direct=98.1)) == []
    assert uses(row(1, direct=98.0)) == [(1, "direct")]


def test_a_variant_that_was_slower_at_the_lower_end_is_not_used_in_between():
    assert uses(row(64, tile=101.0), row(128, tile=50.0)) == [(127, STOCK), (128, "tile")]
    assert uses(row(64, tile=100.0), row(128, tile=50.0)) == [(64, STOCK), (128, "tile")]


def test_a_variant_that_was_not_measured_at_the_lower_end_is_not_used_in_between():
    assert uses(row(8, direct=80.0), row(16, tile=50.0)) == [(7, STOCK), (8, "direct"), (15, STOCK), (16, "tile")]


def test_of_neighbouring_numbers_only_the_upper_one_counts():
    assert uses(row(1, direct=120.0), row(2, direct=50.0)) == [(1, STOCK), (2, "direct")]


def test_of_several_variants_the_fastest_at_the_upper_end_is_used():
    assert uses(row(8, a=90.0, b=80.0), row(16, a=70.0, b=75.0)) == [(7, STOCK), (8, "b"), (16, "a")]


def test_below_the_first_measured_number_is_vllms():
    assert uses(row(4, direct=50.0)) == [(3, STOCK), (4, "direct")]


def test_equal_neighbours_are_one_range_and_the_last_is_never_vllms():
    ranges = token_ranges([row(1, a=50.0), row(2, a=50.0), row(4, a=50.0), row(8, a=200.0)])
    assert ranges == (TokenRange(up_to=4, use="a"),)
    assert kernel_for(ranges, 4) == "a"
    assert kernel_for(ranges, 5) == STOCK


times = st.floats(min_value=1.0, max_value=1000.0)
variants = st.dictionaries(st.sampled_from(["direct", "n16", "n32"]), times, max_size=3)
measured = st.lists(
    st.tuples(st.integers(1, 9000), times, variants), min_size=1, max_size=12, unique_by=lambda entry: entry[0]
)


def ascending(entries):
    return [TokenSpeeds(tokens=n, stock_us=us, ours_us=ours) for n, us, ours in sorted(entries, key=lambda e: e[0])]


@given(measured)
def test_at_a_measured_number_nothing_slower_than_vllms_is_ever_used(entries):
    rows = ascending(entries)
    ranges = token_ranges(rows)
    assert [each.up_to for each in ranges] == sorted({each.up_to for each in ranges})
    for each in rows:
        used = kernel_for(ranges, each.tokens)
        assert used == STOCK or each.ours_us[used] < each.stock_us


@given(measured)
def test_in_between_a_variant_is_used_only_where_both_neighbours_were_faster_with_it(entries):
    rows = ascending(entries)
    ranges = token_ranges(rows)
    for lower, upper in itertools.pairwise(rows):
        if lower.tokens + 1 < upper.tokens:
            used = kernel_for(ranges, upper.tokens - 1)
            assert used == STOCK or (lower.ours_us[used] <= lower.stock_us and upper.ours_us[used] < upper.stock_us)


def test_a_kernel_for_all_or_nothing_must_lose_nowhere_and_gain_somewhere():
    assert never_slower([row(1, k=99.0), row(64, k=60.0)], "k")
    assert not never_slower([row(1, k=104.0), row(64, k=60.0)], "k")
    assert not never_slower([row(1, k=100.0), row(64, k=99.0)], "k")
    assert not never_slower([row(1, k=50.0), row(64)], "k")
    assert not never_slower([], "k")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "NVIDIA H100"}, "for NVIDIA H200"),
        (
            {"shape": dataclasses.replace(QWEN_LAYER, top_k=4)},
            "H=2048, I=768, 128 experts, top-8 on NVIDIA H200",
        ),
        ({"weights": "fp8_block"}, "fp8_block, needed bf16"),
        ({"vllm": "0.27.0"}, "vLLM 0.27.0, needed 0.26.0"),
        ({"kernel_hash": "def"}, " sources: def, needed abc"),
        ({"kernel_hash": "d" * 64}, f" sources: {'d' * 12}, needed abc"),
    ],
)
def test_a_table_of_something_else_is_not_used_and_the_difference_is_named(change, why):
    tables = SpeedTables(tables=(table(**change),))
    assert tables.find(QUESTION) is None
    assert tables.why_none(QUESTION).endswith(why)


def test_the_nearest_table_is_the_one_that_is_compared():
    tables = SpeedTables(tables=(table(vllm="0.27.0"), table(weights="fp8_block")))
    assert tables.why_none(QUESTION).endswith("vLLM 0.27.0, needed 0.26.0")


def test_a_table_measured_under_another_driver_is_measured_again():
    old = table(measured_here=True, driver="570")
    assert "driver 570, needed none" in QUESTION.why_not(old)
    assert dataclasses.replace(QUESTION, driver="570").why_not(old) == ""
    assert QUESTION.why_not(table(driver="570")) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"torch": "2.11"}, "torch 2.11, needed none"),
        ({"triton": "3.5"}, "Triton 3.5, needed none"),
        ({"environment": "VLLM_MOE_X=1"}, "VLLM_MOE_X=1, needed none"),
    ],
)
def test_a_table_measured_here_with_other_software_is_measured_again(change, why):
    assert QUESTION.why_not(table(measured_here=True, driver="", **change)).endswith(why)


def test_a_shipped_table_holds_for_any_driver_and_torch_but_not_for_other_settings_of_vllm():
    assert QUESTION.why_not(table(torch="2.11", triton="3.5")) == ""
    tuned = dataclasses.replace(QUESTION, environment="tuned=abc")
    assert tuned.why_not(table()).endswith("vLLM, needed tuned=abc")


@pytest.mark.parametrize("change", [{"unfinished": True}, {"disturbed": "busy"}])
def test_a_final_table_goes_before_a_later_one_that_is_not(change):
    final, later = table(), table(driver="", **change)
    assert SpeedTables(tables=(final, later)).find(QUESTION) == final
    assert SpeedTables(tables=(later,)).find(QUESTION) == later


def test_what_was_measured_here_goes_before_what_is_shipped():
    shipped, here = table(source="record"), table(source="measured here")
    assert SpeedTables(tables=(shipped, here)).find(QUESTION) == here


def test_where_nothing_else_computes_the_fastest_of_ours_is_taken_at_every_number():
    rows = (row(1, direct=9.0), row(8, direct=20.0, tile=19.0), row(64, tile=50.0, wide=40.0))
    found = [(each.up_to, each.use) for each in fastest_ranges(rows)]
    assert found == [(7, "direct"), (63, "tile"), (ANY_NUMBER, "wide")]


def test_between_neighbouring_numbers_there_is_no_range():
    rows = (row(1, direct=1.0), row(4, direct=2.0, tile=1.0), row(5, direct=2.0, wide=1.0))
    found = [(each.up_to, each.use) for each in fastest_ranges(rows)]
    assert found == [(3, "direct"), (4, "tile"), (ANY_NUMBER, "wide")]


TIMES = st.dictionaries(st.sampled_from(["direct", "tile", "wide"]), st.floats(1, 1000), min_size=1)


@given(st.dictionaries(st.integers(1, 5000), TIMES, min_size=1, max_size=6))
def test_a_dispatch_without_vllms_kernel_covers_all_and_is_the_fastest_where_it_was_measured(measured):
    rows = [TokenSpeeds(tokens=tokens, stock_us=1.0, ours_us=measured[tokens]) for tokens in sorted(measured)]
    ranges = fastest_ranges(rows)
    assert [each.up_to for each in ranges] == sorted({each.up_to for each in ranges})
    assert ranges[-1].up_to == ANY_NUMBER
    assert all(first.use != second.use for first, second in itertools.pairwise(ranges))
    for each in rows:
        assert each.ours_us[kernel_for(ranges, each.tokens)] == min(each.ours_us.values())


@pytest.mark.parametrize(
    ("rows", "rounded", "expected"),
    [
        ((row(1, direct=60.0), row(64, direct=101.0)), False, True),
        ((row(1, direct=60.0), row(64, direct=103.0)), False, False),
        ((row(1, direct=99.0),), False, False),
        (
            (row(1, direct=60.0), TokenSpeeds(tokens=64, stock_us=100.0, ours_us={"grouped-mxfp4-n64": 50.0})),
            False,
            False,
        ),
        (
            (row(1, direct=60.0), TokenSpeeds(tokens=64, stock_us=100.0, ours_us={"grouped-mxfp4-n64": 50.0})),
            True,
            True,
        ),
        ((), False, False),
    ],
    ids=["level somewhere", "slower somewhere", "nowhere a gain", "only by rounding", "by rounding", "nothing"],
)
def test_ours_take_the_place_of_vllms_where_they_lose_at_no_number_of_tokens(rows, rounded, expected):
    assert ours_never_slower(table(rows=rows), rounded=rounded) is expected


def test_beside_a_backend_of_vllms_that_was_not_timed_nothing_is_known():
    timed = TokenSpeeds(tokens=1, stock_us=10.0, ours_us={"direct": 50.0})
    assert not ours_never_slower(table(rows=(timed,), backend="marlin"))
    assert ours_never_slower(table(rows=(dataclasses.replace(timed, peers_us={"marlin": 60.0}),), backend="marlin"))
