"""What is kept of measurements, and what the budget allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.trial import BudgetSpentError, Outcome, Trial

FOUND = Outcome(ours=Trial(scores=(1.0, 2.0), figures={"ttft_p99_ms": 3.0}))


class Clock:
    """What `time.monotonic` gives."""

    def __init__(self) -> None:
        self.now = 0.0

    def takes(self, seconds: float, *, cut_off: bool = False) -> Callable[[], Outcome]:
        """Return a measurement that takes so long."""

        def measure() -> Outcome:
            self.now += seconds
            if cut_off:
                raise BudgetSpentError
            return FOUND

        return measure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("time.monotonic", lambda: found.now)
    return found


def nobody() -> Outcome:
    raise AssertionError("measured")


def cut_off(journal: Journal, measure: Callable[[], Outcome]) -> None:
    with pytest.raises(BudgetSpentError):
        journal.measured("paired", ("a", "b"), measure)


def test_a_measurement_that_would_not_end_in_time_is_not_started(clock: Clock) -> None:
    journal = Journal(None, budget_s=100)
    journal.measured("paired", ("a", "b"), clock.takes(60))
    assert journal.has_room("alone")
    assert not journal.has_room("alone", "alone")
    with pytest.raises(BudgetSpentError):
        journal.measured("paired", ("a", "c"), nobody)


def test_a_start_that_is_not_repeated_is_no_part_of_what_the_next_takes(tmp_path: Path, clock: Clock) -> None:
    def two_cold_starts() -> Outcome:
        clock.now += 300.0
        return dataclasses.replace(FOUND, once_s=100.0)

    Journal(tmp_path, budget_s=1000).measured("paired", ("a", "b"), two_cold_starts)
    again = Journal(tmp_path, budget_s=1000)
    again.measured("paired", ("a", "b"), nobody)
    assert [again.estimate_s(kind) for kind in ("paired", "ablated", "judged")] == [200.0, 200.0, 100.0]
    assert again.spent_s == 300.0


def test_what_was_measured_before_counts_once_and_is_not_measured_again(tmp_path: Path, clock: Clock) -> None:
    first = Journal(tmp_path, budget_s=100).measured("paired", ("a", "b"), clock.takes(60))
    again = Journal(tmp_path, budget_s=100)
    assert [again.measured("paired", ("a", "b"), nobody) for _ in range(2)] == [first, first]
    assert (first.seconds, again.spent_s) == (60, 60)


def test_two_servers_are_compared_once_whatever_for(tmp_path: Path, clock: Clock) -> None:
    journal = Journal(tmp_path, budget_s=100)
    first = journal.measured("paired", ("a", "b"), clock.takes(60))
    assert journal.measured("ablated", ("a", "b"), nobody) == first


def test_measurements_of_something_else_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path, budget_s=1, identity="one")
    with pytest.raises(InputError, match="--run-dir"):
        Journal(tmp_path, budget_s=1, identity="other")


def test_a_measurement_that_was_cut_off_has_spent_its_time(clock: Clock) -> None:
    journal = Journal(None, budget_s=100)
    cut_off(journal, clock.takes(42, cut_off=True))
    assert (journal.spent_s, journal.left_s) == (42.0, 58.0)
    assert journal.cut_off_s("paired", ("a", "b")) == 42.0


def test_the_time_of_a_measurement_that_was_cut_off_is_spent_in_the_run_that_goes_on(
    tmp_path: Path, clock: Clock
) -> None:
    cut_off(Journal(tmp_path, budget_s=100), clock.takes(42, cut_off=True))
    cut_off(Journal(tmp_path, budget_s=100), clock.takes(8, cut_off=True))
    journal = Journal(tmp_path, budget_s=100)
    assert (journal.spent_s, journal.cut_off_s("paired", ("a", "b"))) == (50.0, 50.0)
    # It goes on with what it had: all of it is how long such a measurement takes.
    assert journal.measured("paired", ("a", "b"), clock.takes(10)).seconds == 60.0
    assert (journal.spent_s, journal.estimate_s("paired")) == (60.0, 60.0)
    assert Journal(tmp_path, budget_s=100).cut_off_s("paired", ("a", "b")) == 0.0


def test_the_time_between_measurements_is_spent(tmp_path: Path, clock: Clock) -> None:
    journal = Journal(tmp_path, budget_s=100, before_s=5.0)
    clock.now += 2.0
    assert journal.spent_s == 7.0
    journal.measured("paired", ("a", "b"), clock.takes(10))
    clock.now += 3.0
    assert journal.spent_s == 20.0
    journal.measured("alone", ("a",), clock.takes(10))
    again = Journal(tmp_path, budget_s=100, before_s=1.0)
    again.measured("paired", ("a", "b"), nobody)
    again.measured("alone", ("a",), nobody)
    # What came before the search in an earlier run was spent too.
    assert again.spent_s == 31.0


def test_what_is_replayed_finds_the_time_that_was_left_then(tmp_path: Path, clock: Clock) -> None:
    journal = Journal(tmp_path, budget_s=100)
    journal.measured("paired", ("a", "b"), clock.takes(40))
    with pytest.raises(BudgetSpentError):
        journal.measured("paired", ("a", "c"), clock.takes(50, cut_off=True))
    again = Journal(tmp_path, budget_s=100)
    clock.now += 5.0
    assert again.left_s == 100.0
    again.measured("paired", ("a", "b"), nobody)
    assert again.left_s == 5.0


def test_a_measurement_on_file_that_is_not_asked_for_hides_no_time(tmp_path: Path, clock: Clock) -> None:
    Journal(tmp_path, budget_s=100).measured("paired", ("a", "b"), clock.takes(40))
    again = Journal(tmp_path, budget_s=100)
    again.measured("paired", ("a", "c"), clock.takes(10))
    clock.now += 1.0
    assert again.spent_s == 51.0


def test_the_share_is_of_the_time_of_this_run_and_grows_during_a_measurement(tmp_path: Path, clock: Clock) -> None:
    seen = []
    Journal(tmp_path, budget_s=100).measured("paired", ("a", "b"), clock.takes(60))
    journal = Journal(tmp_path, budget_s=100)
    journal.measured("paired", ("a", "b"), nobody)

    def measure() -> Outcome:
        seen.append(journal.share)
        clock.now += 10.0
        # Of 100 s an earlier run has spent 60.
        seen.append(journal.share)
        return FOUND

    journal.measured("alone", ("a",), measure)
    assert [*seen, journal.share, journal.spent_s] == [0.0, 0.25, 0.25, 70.0]
