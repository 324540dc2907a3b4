"""What is kept of measurements, and what the budget allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.trial import BudgetSpentError, Outcome, Trial

FOUND = Outcome(seconds=60, ours=Trial(scores=(1.0, 2.0), figures={"ttft_p99_ms": 3.0}))


def nobody() -> Outcome:
    raise AssertionError("measured")


def test_a_measurement_that_would_not_end_in_time_is_not_started() -> None:
    journal = Journal(None, budget_s=100)
    journal.measured("paired", ("a", "b"), lambda: FOUND)
    assert journal.has_room("alone")
    assert not journal.has_room("alone", "alone")
    with pytest.raises(BudgetSpentError):
        journal.measured("paired", ("a", "c"), nobody)


def test_what_was_measured_before_counts_once_and_is_not_measured_again(tmp_path: Path) -> None:
    Journal(tmp_path, budget_s=100).measured("paired", ("a", "b"), lambda: FOUND)
    again = Journal(tmp_path, budget_s=100)
    assert [again.measured("paired", ("a", "b"), nobody) for _ in range(2)] == [FOUND, FOUND]
    assert again.spent_s == 60


def test_measurements_of_something_else_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path, budget_s=1, identity="one")
    with pytest.raises(InputError, match="--run-dir"):
        Journal(tmp_path, budget_s=1, identity="other")


def test_a_measurement_that_was_cut_off_has_spent_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off() -> Outcome:
        clock.append(42.0)
        raise BudgetSpentError

    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[-1])
    journal = Journal(None, budget_s=100)
    with pytest.raises(BudgetSpentError):
        journal.measured("paired", ("a", "b"), cut_off)
    assert (journal.spent_s, journal.left_s) == (42.0, 58.0)


def test_the_share_is_of_the_time_of_this_run_and_grows_during_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, seen = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[-1])
    Journal(tmp_path, budget_s=100).measured("paired", ("a", "b"), lambda: FOUND)
    journal = Journal(tmp_path, budget_s=100)
    journal.measured("paired", ("a", "b"), nobody)

    def measure() -> Outcome:
        seen.append(journal.share)
        clock.append(10.0)
        # Of 100 s an earlier run has spent 60.
        seen.append(journal.share)
        return Outcome(seconds=10.0)

    journal.measured("alone", ("a",), measure)
    assert [*seen, journal.share, journal.spent_s] == [0.0, 0.25, 0.25, 70.0]
