"""How often kernels are sampled, and what comes of the samples."""

from __future__ import annotations

import statistics
import time
from collections import Counter

from moe_optimizer.measure.kernel_speeds.timing import cpu_sampler, repeated
from moe_optimizer.specs.kernel_speeds import STOCK


class Clock:
    """Returns times in turn, and counts how often each kernel was asked."""

    def __init__(self, **times: list[float]) -> None:
        self.times, self.asked = times, Counter()

    def __call__(self, name: str) -> float:
        values = self.times[name]
        self.asked[name] += 1
        return values[(self.asked[name] - 1) % len(values)]


def later() -> float:
    return time.monotonic() + 600


def test_a_loser_is_sampled_once() -> None:
    clock = Clock(stock=[100.0], a=[50.0], b=[200.0])
    found = repeated(clock, (STOCK, "a", "b"), later(), statistics.median)
    assert clock.asked["b"] == 1
    assert clock.asked["a"] == clock.asked[STOCK] > 3
    assert found.times_us == {STOCK: 100.0, "a": 50.0}


def test_after_the_deadline_a_few_samples_are_still_taken() -> None:
    clock = Clock(stock=[100.0], a=[50.0])
    repeated(clock, (STOCK, "a"), 0.0, statistics.median)
    assert clock.asked[STOCK] == 3


def test_a_steady_device_has_no_spread_and_a_disturbed_one_has() -> None:
    assert repeated(Clock(stock=[100.0], a=[50.0]), (STOCK, "a"), later(), min).spread == 0
    assert repeated(Clock(stock=[100.0, 180.0], a=[50.0]), (STOCK, "a"), later(), min).spread > 0.5


def test_calls_of_a_kernel_are_run_for_each_sample() -> None:
    ran: list[str] = []
    sample = cpu_sampler({"a": [lambda: ran.append("a")] * 3})
    assert sample("a") > 0
    assert len(ran) == 1 + 3  # one to warm up
