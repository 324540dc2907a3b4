"""The order of a benchmark's rounds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.measure.bench.schedule import starts
from moe_optimizer.measure.bench.trace import Load

LOADS = (Load(clients=1), Load(clients=16))


@given(st.integers(1, 7), st.integers(1, 2), st.booleans())
def test_every_side_is_measured_equally_often_after_a_warm_up_of_each_start(repetitions, sides, side_by_side):
    plan = starts(LOADS, repetitions, sides, side_by_side=side_by_side)
    turns = [turn for start in plan for turn in start.turns]
    counted = Counter((turn.side, turn.load) for turn in turns if turn.counted)
    assert set(counted.values()) == {repetitions}
    assert len({turn.key for turn in turns}) == len(turns)
    for start in plan:
        for side in start.sides:
            own = [turn for turn in start.turns if turn.side == side]
            assert [turn.counted for turn in own] == sorted(turn.counted for turn in own)
            assert {turn.load for turn in own if not turn.counted} == set(LOADS)


@given(st.integers(1, 4).map(lambda half: 2 * half), st.booleans())
def test_no_side_is_always_first(repetitions, side_by_side):
    plan = starts(LOADS, repetitions, 2, side_by_side=side_by_side)
    order = [turn for start in plan for turn in start.turns if turn.counted and turn.load == LOADS[0]]
    first = Counter(turn.side for turn in order[::2])
    assert first[0] == first[1]


def test_servers_are_started_once_side_by_side_and_anew_in_turns():
    assert [start.sides for start in starts(LOADS, 3, 2, side_by_side=True)] == [(0, 1)]
    assert [start.sides for start in starts(LOADS, 3, 2, side_by_side=False)] == [(0,), (1,), (1,), (0,), (0,), (1,)]
