from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.plan_context.cpu_cores import core_lists


@pytest.mark.parametrize(
    ("cores", "processes", "lists"),
    [
        ((0, 1, 2, 3), 2, ("0-1", "2-3")),
        ((0, 1, 2, 3, 4), 2, ("0-2", "3-4")),
        ((4, 5, 6, 9, 12), 2, ("4-6", "9,12")),
        ((7, 8), 2, ("7", "8")),
        ((0, 2, 4), 1, ("0,2,4",)),
    ],
)
def test_lists_are_as_the_kernel_writes_them(cores, processes, lists):
    assert core_lists(cores, processes) == lists


def numbers(text: str) -> list[int]:
    """Read a list as vLLM does."""
    parts = (part.partition("-") for part in text.split(","))
    return [core for first, _, last in parts for core in range(int(first), int(last or first) + 1)]


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.data())
def test_every_core_is_one_processs_and_shares_differ_by_one_at_most(cores, data):
    processes = data.draw(st.integers(1, len(cores)))
    lists = [numbers(text) for text in core_lists(sorted(cores), processes)]
    assert [core for each in lists for core in each] == sorted(cores)
    sizes = {len(each) for each in lists}
    assert max(sizes) - min(sizes) <= 1
