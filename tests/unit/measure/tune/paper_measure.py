"""A stand-in for servers: the speed of a candidate is a product of factors, with noise that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.trial import BudgetSpentError, Candidate, Hopeless, Outcome, Trial

STOCK_SPEED = 100.0


@dataclass
class PaperMeasure:
    """What servers would give, and what was asked of them."""

    passes: Mapping[str, float] = field(default_factory=dict)
    """Pass -> factor of the speed while it is on."""
    offered: Mapping[str, float] = field(default_factory=dict)
    """The same of passes that the plan leaves off."""
    settings: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Flag and value -> factor."""
    noise: float = 0.001
    seconds: float = 10.0
    """Of a pair; one alone takes half."""
    repetitions: int = 4
    journal: Journal | None = None
    illegal: frozenset[tuple[str, str]] = frozenset()
    wrong: frozenset[str] = frozenset()
    """Passes whose answers do not keep the thresholds."""
    apart: frozenset[str] = frozenset()
    """Passes that cannot all be on."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Pass -> what it cannot be on without."""
    displaced: Mapping[str, str] = field(default_factory=dict)
    """Pass that the planner takes by itself where another is off -> the other."""
    changing: frozenset[str] = frozenset()
    """Passes that change answers."""
    dead: frozenset[str] = frozenset()
    """Passes with which the server dies."""
    all_dead: bool = False
    """No server starts."""
    stop_after: int | None = None
    """Measurements before Ctrl-C."""
    asked: list[str] = field(default_factory=list)
    now: float = 0.0
    """What a clock would say."""

    def on(self, candidate: Candidate) -> set[str]:
        if candidate.stock:
            return set()
        on = set(self.passes) - candidate.off | candidate.on
        return on | {name for name, other in self.displaced.items() if other not in on}

    def speed(self, candidate: Candidate) -> float:
        factors = [{**self.passes, **self.offered}.get(name, 1.0) for name in self.on(candidate)]
        factors += [self.settings.get(each, 1.0) for each in candidate.arguments]
        found = STOCK_SPEED
        for each in factors:
            found *= each
        return found

    def why_not(self, candidate: Candidate) -> str:
        if self.apart and self.apart <= self.on(candidate):
            return "they exclude each other"
        if any(name in self.on(candidate) and other not in self.on(candidate) for name, other in self.needs.items()):
            return "one needs another"
        return "not legal" if set(candidate.arguments) & self.illegal else ""

    def identity(self, candidate: Candidate) -> str:
        assert not self.why_not(candidate), "there is no such plan"
        return f"{sorted(self.on(candidate))} {candidate.arguments}"

    def changes_answers(self, candidate: Candidate) -> bool:
        return bool(self.on(candidate) & (self.changing | self.wrong))

    def paired(self, ours: Candidate, theirs: Candidate) -> Outcome:
        self._take("paired", f"{self.identity(ours)} {self.identity(theirs)}", self.seconds)
        if self.all_dead or (self.on(ours) | self.on(theirs)) & self.dead:
            return Outcome(failed="the server has ended")
        first, second = self._scores(ours, "pair"), self._scores(theirs, "pair")
        return Outcome(ours=Trial(scores=first), theirs=Trial(scores=second))

    def alone(self, candidate: Candidate, hopeless: Hopeless) -> Outcome:
        self._take("alone", self.identity(candidate), self.seconds / 8)
        if self.all_dead or self.on(candidate) & self.dead:
            return Outcome(failed="the server has ended")
        scores = self._scores(candidate, "alone")
        for count in range(1, len(scores)):
            if hopeless(scores[:count]):
                return Outcome(ours=Trial(scores=scores[:count]), pruned=True)
        self._pass(self.seconds / 2 - self.seconds / 8)
        return Outcome(ours=Trial(scores=scores))

    def judged(self, candidate: Candidate) -> Outcome:
        self._take("judged", self.identity(candidate), self.seconds)
        blamed = tuple(sorted(self.on(candidate) & self.wrong))
        return Outcome(failed_metrics=("kl_mean",) if blamed else (), blamed=blamed)

    def _scores(self, candidate: Candidate, kind: str) -> tuple[float, ...]:
        drawn = random.Random(f"{kind} {self.identity(candidate)}")
        return tuple(self.speed(candidate) * drawn.lognormvariate(0, self.noise) for _ in range(self.repetitions))

    def _take(self, kind: str, what: str, seconds: float) -> None:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(f"{kind} {what}")
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        left_s = seconds if self.journal is None else self.journal.left_s
        self.now += min(seconds, left_s)
        if seconds > left_s:
            raise BudgetSpentError
