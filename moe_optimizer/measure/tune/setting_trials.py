"""Tries settings of vLLM on a plan, and confirms the best of them against the plan without."""

from __future__ import annotations

from moe_optimizer.measure.tune.comparison import median_score
from moe_optimizer.measure.tune.measurements import Measurements
from moe_optimizer.measure.tune.question import Question
from moe_optimizer.measure.tune.setting_search import SettingSearch
from moe_optimizer.measure.tune.settings import UNCHANGED, arguments_of
from moe_optimizer.measure.tune.step_budget import CONFIRMATION, SETTING
from moe_optimizer.measure.tune.trial import Candidate, words

_MOST_FAILURES = 3
"""Settings in a row without a result, before any candidate has one: no setting makes such a server start."""
_MOST_REPEATS = 20
"""Settings in a row that were tried before: the sampler has nothing new to say."""


class SettingTrials:
    """The settings of a question.

    Args:
        question: has the settings.
        measurements: takes and tells what is measured.
    """

    def __init__(self, question: Question, measurements: Measurements) -> None:
        self._question, self._done = question, measurements
        self._untried = {flag: {*values} - {UNCHANGED} for flag, values in question.settings.items()}
        self._why_untried = ""

    def winners(self, start: Candidate) -> Candidate:
        """Return the candidate with settings that win against those it has."""
        if not self._question.settings:
            return start
        best = self._best(start)
        if best == start:
            return start
        if why := self._done.why_no_time(CONFIRMATION, of=best):
            self._done.note("confirmation", str(best), kept=False, reason=why)
            return start
        pair = self._done.pair(best, start)
        self._done.note_pair("confirmation", str(best), start, pair, kept=pair[1].is_win)
        return best if pair[1].is_win else start

    def note_untried(self, reason: str) -> None:
        """Name the values that no measurement had time for; `reason` says why, where the search itself does not."""
        for flag, values in self._question.settings.items():
            if left := [value for value in values if value in self._untried[flag]]:
                what = ", ".join((words(flag, left[0]), *left[1:]))
                self._done.note("setting", what, kept=False, reason=self.why_untried or reason)

    @property
    def why_untried(self) -> str:
        """Why no further settings were tried; "" where an end of the search is the reason."""
        return f"not tried: {self._why_untried}" if self._why_untried else ""

    def _best(self, start: Candidate) -> Candidate:
        """Try settings while there is time to confirm the best of them; return it."""
        question, goal = self._question, self._done.goal
        trials = SettingSearch(question.settings, higher_is_better=goal.higher_is_better, seed=question.seed)
        seen: set[str] = set()
        scored: list[tuple[float, Candidate]] = []
        repeats = failures = 0
        while not self._why_enough(start, seen=len(seen), repeats=repeats, failures=failures):
            changed = arguments_of(trials.ask())
            for flag, value in changed.items():
                self._untried[flag].discard(value)
            candidate = start.having(changed) if changed else start
            why = self._done.measure.why_not(candidate)
            identity = str(candidate) if why else self._done.measure.identity(candidate)
            if identity in seen:
                repeats += 1
                trials.tell(None)
                continue
            seen.add(identity)
            repeats = 0
            if why:
                self._done.note("setting", str(candidate), kept=False, reason=why)
                trials.tell(None)
                continue
            score = self._scored(candidate, trials)
            if score is not None:
                scored.append((score, candidate))
            else:
                failures += 1
        choose = max if goal.higher_is_better else min
        return choose(scored, key=lambda each: each[0])[1] if scored else start

    def _why_enough(self, start: Candidate, *, seen: int, repeats: int, failures: int) -> str:
        """Return why no further settings are tried, and keep it; "" where some are."""
        if why := self._done.why_no_time(SETTING, of=start):
            self._why_untried = why
        elif failures == _MOST_FAILURES and not self._done.count:
            self._why_untried = "no server has started so far"
        elif seen == self._question.most_trials or repeats == _MOST_REPEATS:
            self._why_untried = f"the search has chosen others {seen} times"
        return self._why_untried

    def _scored(self, candidate: Candidate, trials: SettingSearch) -> float | None:
        outcome = self._done.alone(candidate, trials.is_hopeless)
        score = None if outcome.pruned else median_score(outcome.ours)
        trials.tell(score, outcome.ours.scores)
        reason = outcome.failed or ("hopeless after the first repetitions" if outcome.pruned else "tried")
        shown = median_score(outcome.ours)
        self._done.note("setting", str(candidate), kept=False, reason=reason, score=shown, seconds=outcome.seconds)
        return score
