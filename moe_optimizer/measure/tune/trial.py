"""Defines what a search tries, what it asks of whoever measures, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol


class BudgetSpentError(KeyboardInterrupt):
    """The time is over in the middle of a measurement. It ends one as Ctrl-C does: no handler may go on after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that differs from the first one in passes that are off or on and in arguments of `vllm serve`."""

    off: frozenset[str] = frozenset()
    on: frozenset[str] = frozenset()
    """Passes that the first plan leaves off."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Flag and value, sorted; a value of "" for a bare flag, "false" for its --no- form."""
    stock: bool = False
    """Stock vLLM, whatever else is said."""

    def without(self, passes: Sequence[str]) -> Candidate:
        """Return the same with further passes off."""
        off = frozenset(passes)
        return Candidate(off=self.off | (off - self.on), on=self.on - off, arguments=self.arguments)

    def adding(self, passes: Sequence[str]) -> Candidate:
        """Return the same with passes on that the first plan leaves off."""
        return Candidate(off=self.off, on=self.on | frozenset(passes), arguments=self.arguments)

    def having(self, values: Mapping[str, str]) -> Candidate:
        """Return the same with other arguments."""
        return Candidate(off=self.off, on=self.on, arguments=tuple(sorted(values.items())))

    def __str__(self) -> str:
        if self.stock:
            return "stock vLLM"
        passes = [f"without {', '.join(sorted(self.off))}"] if self.off else []
        passes += [f"with {', '.join(sorted(self.on))}"] if self.on else []
        shown = [words(flag, value) for flag, value in self.arguments]
        return "; ".join([*passes, *shown]) or "the plan"


def words(flag: str, value: str) -> str:
    """Return an argument as a command line has it."""
    return f"--no-{flag[2:]}" if value == "false" else f"{flag} {value}".strip()


PLAN = Candidate()
"""The plan as it was made, with everything on that was planned."""
STOCK = Candidate(stock=True)
"""Stock vLLM: the plugin changes nothing, and the arguments are only the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was measured of one candidate: a score for each repetition, in order."""

    scores: tuple[float, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one measurement gave."""

    seconds: float = 0.0
    """That it took, what came since the measurement before it and start and stop of the servers included; the journal
    says it."""
    once_s: float = 0.0
    """Seconds of those that one like it does not take again: it starts one server at most, beside one that stays up."""
    ours: Trial = Trial()
    theirs: Trial = Trial()
    """Empty for a candidate that was measured alone."""
    pruned: bool = False
    """Ended early, because the first repetitions were hopeless."""
    failed: str = ""
    """Why there are no scores: the server died, a request failed, an optimization did not run."""
    failed_metrics: tuple[str, ...] = ()
    """Of a judgement: thresholds of the profile that were not kept."""
    blamed: tuple[str, ...] = ()
    """Of a judgement: passes that fail alone."""
    doubt: str = ""
    """Of a judgement: why it says little."""


Hopeless = Callable[[Sequence[float]], bool]
"""Takes the scores so far; True ends the trial."""


class Measure(Protocol):
    """Measures candidates. Each method may raise `BudgetSpentError` or `KeyboardInterrupt`."""

    def why_not(self, candidate: Candidate) -> str:
        """Return why there is no such plan here, "" if there is one."""
        ...

    def identity(self, candidate: Candidate) -> str:
        """Return a text that is equal for candidates that serve the same."""
        ...

    def on(self, candidate: Candidate) -> Set[str]:
        """Return the optimizations that are on in its plan."""
        ...

    def changes_answers(self, candidate: Candidate) -> bool:
        """Return whether it computes with other kernels, weights or cache than stock vLLM."""
        ...

    def paired(self, ours: Candidate, theirs: Candidate) -> Outcome:
        """Measure two in turns."""
        ...

    def alone(self, candidate: Candidate, hopeless: Hopeless) -> Outcome:
        """Measure one by itself, which takes half as long."""
        ...

    def judged(self, candidate: Candidate) -> Outcome:
        """Compare its answers with those of stock vLLM."""
        ...
