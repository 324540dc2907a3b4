"""Takes the measurements of a search, and writes a line of its ledger for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moe_optimizer.measure.tune.comparison import Comparison, compared, median_score
from moe_optimizer.measure.tune.goal import Goal
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.ledger import Entry, NearestMiss, Step
from moe_optimizer.measure.tune.step_budget import StepBudget
from moe_optimizer.measure.tune.trial import PLAN, Candidate, Hopeless, Measure, Outcome, Trial

OnStep = Callable[[float, str], None]


class Measurements:
    """What was measured so far, and the lines of the ledger.

    Args:
        goal: scores the repetitions.
        measure: starts the servers.
        journal: has earlier measurements, and the time that is left.
        on_step: takes the share of the time that is over, and what is measured next.
    """

    def __init__(self, goal: Goal, measure: Measure, journal: Journal, on_step: OnStep) -> None:
        self.goal, self.measure = goal, measure
        self._journal, self._on_step = journal, on_step
        self.entries: list[Entry] = []
        self.last_failure = ""
        self.left_out = False
        """Whether something was not tried for lack of time."""
        self._trials: dict[str, tuple[Candidate, Trial]] = {}
        self._under_way: tuple[str, str, tuple[str, ...]] | None = None
        """What is being measured: in words, and as the journal has it."""
        self._counted: set[tuple[str, ...]] = set()
        """Measurements whose time a line of the ledger has."""

    @property
    def count(self) -> int:
        """Candidates that have a result."""
        return len(self._trials)

    def scores(self, candidate: Candidate) -> tuple[float, ...]:
        """Return those of a candidate that was measured last; none where it was not."""
        found = self._trials.get(self.measure.identity(candidate))
        return found[1].scores if found else ()

    def nearest(self) -> NearestMiss | None:
        """Return what came nearest to the goal's limits."""
        scored = [(score, *each) for each in self._trials.values() if (score := median_score(each[1])) is not None]
        if not scored:
            return None
        score, candidate, trial = min(scored, key=lambda each: each[0])
        return NearestMiss(what=str(candidate), score=score, figures=trial.figures)

    def same(self, one: Candidate, other: Candidate) -> bool:
        """Return whether the servers of two candidates are alike."""
        return self.measure.identity(one) == self.measure.identity(other)

    def why_no_time(self, budget: StepBudget, *, of: Candidate, next_waits: bool = False) -> str:
        """Return why a step measures nothing more of a candidate; "" where it does. As `StepBudget.why_not`."""
        judged = any(map(self.measure.changes_answers, (PLAN, of)))
        why = budget.why_not(self._journal, judged=judged, next_waits=next_waits)
        self.left_out |= bool(why)
        return why

    # Measuring

    def pair(self, ours: Candidate, theirs: Candidate, *, kind: str = "paired") -> tuple[Outcome, Comparison]:
        """Measure two candidates in turns, and compare them."""
        outcome = self._measured(
            kind,
            (self.measure.identity(ours), self.measure.identity(theirs)),
            f"{ours} against {theirs}",
            lambda: self.measure.paired(ours, theirs),
        )
        if not outcome.failed:
            self._remember(ours, outcome.ours)
            self._remember(theirs, outcome.theirs)
        return outcome, compared(outcome, self.goal)

    def alone(self, candidate: Candidate, hopeless: Hopeless) -> Outcome:
        """Measure one candidate by itself."""
        outcome = self._measured(
            "alone",
            (self.measure.identity(candidate), str(candidate)),
            f"trying {candidate}",
            lambda: self.measure.alone(candidate, hopeless),
        )
        if not outcome.failed and not outcome.pruned:
            self._remember(candidate, outcome.ours)
        return outcome

    def judged(self, candidate: Candidate) -> Outcome:
        """Compare its answers with those of stock vLLM."""
        return self._measured(
            "judged",
            (self.measure.identity(candidate),),
            f"judging the answers of {candidate}",
            lambda: self.measure.judged(candidate),
        )

    def _remember(self, candidate: Candidate, trial: Trial) -> None:
        self._trials[self.measure.identity(candidate)] = (candidate, trial)

    def _measured(self, kind: str, what: tuple[str, ...], text: str, measure: Callable[[], Outcome]) -> Outcome:
        self._on_step(self._journal.share, text)
        self._under_way = (text, kind, what)
        outcome = self._journal.measured(kind, what, measure)
        self._under_way = None
        self.last_failure = outcome.failed or self.last_failure
        if what in self._counted:
            return dataclasses.replace(outcome, seconds=0.0)
        self._counted.add(what)
        return outcome

    # Telling

    def note(self, step: Step, what: str, *, kept: bool, reason: str, **facts: Any) -> None:
        """Add a line about what was compared with nothing."""
        self.entries.append(Entry(step=step, what=what, against="", kept=kept, reason=reason, **facts))

    def note_pair(
        self,
        step: Step,
        what: str,
        against: Candidate,
        pair: tuple[Outcome, Comparison],
        *,
        kept: bool,
        reason: str | None = None,
        also: str = "",
        **facts: Any,
    ) -> None:
        """Add a line about two that were compared; `also` stands behind the reason."""
        outcome, found = pair
        if reason is None:
            reason = found.failed or ("wins" if found.is_win else f"does not win: {found.word}")
        reason += f"; {also}" if also else ""
        facts = {**found.fields, **facts, "score": median_score(outcome.ours), "seconds": outcome.seconds}
        self.entries.append(Entry(step=step, what=what, against=str(against), kept=kept, reason=reason, **facts))

    def note_unfinished(self, reason: str) -> None:
        """Add a line about what an end of the search cuts off."""
        if self._under_way is None:
            self.note("unfinished", "the next step", kept=False, reason=reason)
            return
        text, kind, what = self._under_way
        seconds = self._journal.cut_off_s(kind, what)
        self.note("unfinished", text, kept=False, reason=reason, seconds=seconds)
