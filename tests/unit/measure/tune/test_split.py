"""What each step of a tuning may take of the budget."""

from __future__ import annotations

import pytest

from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.split import ABLATION, CONFIRMATION, SETTING, Part
from moe_optimizer.measure.tune.trial import Outcome


def after(pairs: int, *, budget_s: float = 100.0) -> Journal:
    """Return what is left after pairs of 10 s."""
    journal = Journal(None, budget_s=budget_s)
    for number in range(pairs):
        journal.measured("paired", (str(number),), lambda: Outcome(seconds=10.0))
    return journal


@pytest.mark.parametrize(
    ("part", "judged", "most"),
    [(ABLATION, False, 8), (ABLATION, True, 7), (SETTING, False, 7), (SETTING, True, 6), (CONFIRMATION, False, 8)],
)
def test_a_step_leaves_time_for_what_must_follow_it(part: Part, judged: bool, most: int) -> None:
    assert not part.why_not(after(most), judged=judged)
    assert part.why_not(after(most + 1), judged=judged).startswith("no time left: it takes ")


def test_the_next_step_has_its_share() -> None:
    assert not ABLATION.why_not(after(7), judged=False, next_waits=True)
    assert ABLATION.why_not(after(8), judged=False, next_waits=True).startswith("75% of the budget is spent")


def test_the_first_measurement_of_all_is_tried_whatever_it_takes() -> None:
    assert not SETTING.why_not(after(0), judged=True)
    assert SETTING.why_not(after(0, budget_s=0.0), judged=True)
