"""What each step of a tuning may take of the budget."""

from __future__ import annotations

import pytest

from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.step_budget import ABLATION, CONFIRMATION, SETTING, StepBudget
from moe_optimizer.measure.tune.trial import Outcome


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[-1])
    return clock


def after(pairs: int, now: list[float], *, budget_s: float = 100.0) -> Journal:
    """Return what is left after pairs of 10 s."""
    journal = Journal(None, budget_s=budget_s)

    def pair() -> Outcome:
        now.append(now[-1] + 10)
        return Outcome()

    for number in range(pairs):
        journal.measured("paired", (str(number),), pair)
    return journal


@pytest.mark.parametrize(
    ("budget", "judged", "most"),
    [(ABLATION, False, 8), (ABLATION, True, 7), (SETTING, False, 7), (SETTING, True, 7), (CONFIRMATION, False, 8)],
)
def test_a_step_leaves_time_for_what_must_follow_it(
    budget: StepBudget, judged: bool, most: int, now: list[float]
) -> None:
    assert not budget.why_not(after(most, now), judged=judged)
    assert budget.why_not(after(most + 1, now), judged=judged).startswith("no time left: it takes ")


def test_the_next_step_has_its_share(now: list[float]) -> None:
    assert not ABLATION.why_not(after(7, now), judged=False, next_waits=True)
    assert ABLATION.why_not(after(8, now), judged=False, next_waits=True).startswith("75% of the budget is spent")


def test_the_first_measurement_of_all_is_tried_whatever_it_takes(now: list[float]) -> None:
    assert not SETTING.why_not(after(0, now), judged=True)
    assert SETTING.why_not(after(0, now, budget_s=0.0), judged=True)
