"""What is added up of a profile."""

from __future__ import annotations

import pytest

from moe_optimizer.measure.decode_step.profiled_steps import exclusive_us


def test_overlapping_launches_are_counted_once() -> None:
    launches = [("up", 0.0, 10.0), ("down", 4.0, 15.0), ("sum", 15.0, 16.0), ("copy", 5.0, 6.0)]
    times = exclusive_us(launches)
    assert times == {"up": 10.0, "down": 5.0, "sum": 1.0, "copy": 0.0}
    assert sum(times.values()) == pytest.approx(16.0)


def test_a_gap_belongs_to_no_kernel() -> None:
    assert exclusive_us([("a", 0.0, 1.0), ("a", 3.0, 5.0)]) == {"a": 3.0}
