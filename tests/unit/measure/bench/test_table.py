"""The table of a benchmark."""

from __future__ import annotations

import dataclasses

from moe_optimizer.measure.bench.table import render
from tests.builders.results import bench_result


def test_the_table_is_no_wider_than_a_terminal() -> None:
    result = bench_result(description="words that describe what is sent " * 4)
    sides = tuple(dataclasses.replace(side, name=f"balanced +speculation {side.name}") for side in result.sides)
    assert max(map(len, render(dataclasses.replace(result, sides=sides)).splitlines())) <= 80


def test_an_interval_that_two_noisy_rounds_leave_open_is_no_wider_than_a_terminal() -> None:
    result = bench_result()
    verdicts = tuple(dataclasses.replace(each, low=1e-90, ratio=2.5e4, high=3.2e88) for each in result.verdicts)
    lines = render(dataclasses.replace(result, verdicts=verdicts)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("3e+88" in line for line in lines)


def test_both_ends_of_a_wide_interval_are_magnitudes() -> None:
    result = bench_result()
    verdicts = tuple(dataclasses.replace(each, low=2.3e-4, high=4.2e3) for each in result.verdicts)
    assert "(2e-04 to 4e+03)" in render(dataclasses.replace(result, verdicts=verdicts))


def test_all_memory_is_in_the_same_units() -> None:
    result = bench_result()
    memory = dataclasses.replace(result.sides[0].memory, gpu_bytes=50_000_000_000, process_bytes=2_920_000_000)
    table = render(
        dataclasses.replace(result, sides=(dataclasses.replace(result.sides[0], memory=memory),), verdicts=())
    )
    assert "GPU memory 50 GB; processes 2.92 GB" in table
