"""The table of a benchmark."""

from __future__ import annotations

import dataclasses

from moe_optimizer.measure.bench.table import render
from tests.builders.results import bench_result


def test_the_table_is_no_wider_than_a_terminal() -> None:
    result = bench_result(description="words that describe what is sent " * 4)
    sides = tuple(dataclasses.replace(side, name=f"balanced +speculation {side.name}") for side in result.sides)
    assert max(map(len, render(dataclasses.replace(result, sides=sides)).splitlines())) <= 80
