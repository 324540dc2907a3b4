"""How far a run is by time."""

from __future__ import annotations

import pytest

from moe_optimizer.measure.bench.pace import Pace


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def test_before_a_round_is_over_it_has_only_begun(now: list[float]) -> None:
    pace = Pace([Pace.START, "1 clients"])
    assert pace.begin(Pace.START) == 0
    now[0] = 90.0
    assert 0 < pace.begin("1 clients") < 0.02  # of which no time left is told


def test_a_start_says_nothing_of_rounds_and_a_load_nothing_of_another(now: list[float]) -> None:
    pace = Pace([Pace.START, *("1 clients", "8 clients") * 2, Pace.START])
    pace.begin(Pace.START)
    now[0] = 60.0
    pace.begin("1 clients")
    now[0] = 70.0
    # The other load is taken for the known one: 3 rounds of 10 s and a start of 60 s are to come.
    assert pace.begin("8 clients") == 70 / (70 + 30 + 60)
    now[0] = 100.0
    # 10 s, 30 s and the start.
    assert pace.begin("1 clients") == 100 / (100 + 10 + 30 + 60)


def test_a_kind_of_which_none_is_over_lasts_by_its_work(now: list[float]) -> None:
    pace = Pace(["warm-up", "round"], work={"warm-up": 1.0, "round": 8.0})
    pace.begin("warm-up")
    now[0] = 10.0
    assert pace.begin("round") == 10 / (10 + 80)


def test_what_passes_between_two_parts_belongs_to_neither(now: list[float]) -> None:
    pace = Pace(["1 clients"] * 3)
    pace.begin("1 clients")
    now[0] = 10.0
    pace.end()
    now[0] = 50.0
    assert pace.begin("1 clients") == 50 / (50 + 20)


def test_the_share_never_falls(now: list[float]) -> None:
    pace = Pace(["1 clients", *["8 clients"] * 2, "1 clients"])
    pace.begin("1 clients")
    now[0] = 10.0
    told = pace.begin("8 clients")
    assert told == 10 / 40  # the others are taken to last as long
    now[0] = 110.0
    pace.expect(["8 clients"] * 3)  # a round lasted ten times as long, and three are sent again
    assert pace.begin("8 clients") == told
    now[0] = 1110.0
    assert pace.begin("8 clients") > told


def test_a_round_that_is_sent_again_is_one_more(now: list[float]) -> None:
    pace = Pace(["1 clients"])
    pace.begin("1 clients")
    now[0] = 10.0
    assert pace.begin("1 clients") == 10 / 20
