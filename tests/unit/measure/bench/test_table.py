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
