"""Compares candidates by what was measured of them in turns."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from moe_optimizer.measure.bench.statistics import Word, gain
from moe_optimizer.measure.tune.goal import Goal
from moe_optimizer.measure.tune.trial import Outcome, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Whether the first of two candidates is better; by the goal's metric."""

    word: Word | None
    """None: one of them could not be measured."""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    failed: str = ""

    @property
    def is_win(self) -> bool:
        """Whether the interval shows that the first is better."""
        return self.word == "faster"

    @property
    def is_loss(self) -> bool:
        """Whether the interval shows that it is worse, or it could not be measured."""
        return self.word in ("slower", None)

    @property
    def fields(self) -> dict[str, float | str | None]:
        """For an entry of the ledger."""
        return {"verdict": self.word, "ratio": self.ratio, "low": self.low, "high": self.high}


def compared(outcome: Outcome, goal: Goal) -> Comparison:
    """Compare the two sides of a paired measurement; each verdict has a confidence of 95 % of its own.

    What was picked among several is measured anew against stock vLLM, so that what won by chance does not stay.
    """
    if outcome.failed:
        return Comparison(word=None, failed=outcome.failed)
    found = gain(outcome.ours.scores, outcome.theirs.scores, higher_is_better=goal.higher_is_better, comparisons=1)
    return Comparison(word=found.verdict, ratio=found.ratio, low=found.low, high=found.high)


def median_score(trial: Trial) -> float | None:
    """Return the score of a candidate; None where it was not measured."""
    return statistics.median(trial.scores) if trial.scores else None
