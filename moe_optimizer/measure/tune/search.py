"""Searches for the best plan: first which passes win, then which settings; nothing that did not win stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from moe_optimizer.measure.tune.ablation import Ablation
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.ledger import Ended, Entry, NearestMiss
from moe_optimizer.measure.tune.measurements import Measurements, OnStep
from moe_optimizer.measure.tune.question import Question
from moe_optimizer.measure.tune.setting_trials import SettingTrials
from moe_optimizer.measure.tune.trial import PLAN, STOCK, BudgetSpentError, Candidate, Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search ended with."""

    candidate: Candidate
    met: bool
    """Whether the limits are kept; without limits, whether anything was compared."""
    compared: bool
    """Whether the candidate is the better of two that were measured, or the only one there is."""
    nearest_miss: NearestMiss | None
    entries: tuple[Entry, ...]
    ended: Ended
    why_nothing: str = ""
    """Why no candidate has a result, stock vLLM included; "" where one has."""


def search(question: Question, measure: Measure, journal: Journal, on_step: OnStep) -> Found:
    """Return the best candidate that was shown to be better than stock vLLM, or else stock vLLM.

    Ends when there is nothing left to try, when the budget is spent, or by Ctrl-C; then with what was found until then.
    """
    return _Search(question, Measurements(question.goal, measure, journal, on_step)).run()


class _Search:
    def __init__(self, question: Question, measurements: Measurements) -> None:
        self._question, self._goal, self._done = question, question.goal, measurements
        self._ablation = Ablation(question, measurements)
        self._settings = SettingTrials(question, measurements)
        self._safe = STOCK
        """What the search would answer if it ended now."""
        self._whole_won = False

    def run(self) -> Found:
        """Take all steps; each can be the last."""
        ended: Ended = "done"
        try:
            self._search()
            ended = "budget" if self._done.left_out else "done"
        except BudgetSpentError:
            ended = "budget"
            reason = "the budget did not last for it"
            if not self._done.count:
                reason += ": give it a larger --budget, or less of --clients, --requests-per-client or --repetitions"
            self._done.note_unfinished(reason)
        except (KeyboardInterrupt, SystemExit):
            ended = "interrupted"
            self._done.note_unfinished("interrupted")
        self._note_untried(ended)
        alone = bool(self._done.count) or not self._done.last_failure
        compared = self._done.count > 1 or (ended == "done" and alone)
        met = compared and self._goal.is_met(self._done.scores(self._safe))
        return Found(
            candidate=self._safe,
            met=met,
            compared=compared,
            nearest_miss=None if met else self._done.nearest(),
            entries=_with_kept_settings(self._done.entries, self._safe),
            ended=ended,
            why_nothing="" if self._done.count else self._done.last_failure,
        )

    def _search(self) -> None:
        chosen = self._with_passes()
        if why := self._done.measure.why_not(chosen):
            self._done.note("ablation", str(chosen), kept=False, reason=f"there is no such plan: {why}")
            chosen = PLAN
        self._settle(self._settings.winners(chosen))

    def _with_passes(self) -> Candidate:
        """Return the plan with the passes that win."""
        if self._done.same(PLAN, STOCK):
            self._done.note("plan", "the plan", kept=False, reason="changes nothing: it is stock vLLM")
            winners = self._ablation.missed()
            return PLAN.adding(winners) if winners else STOCK
        whole = self._ablation.whole()
        self._whole_won = whole.is_win
        if whole.is_win and not self._done.measure.changes_answers(PLAN):
            self._safe = PLAN
        return self._ablation.winners(whole=whole)

    def _note_untried(self, ended: Ended) -> None:
        """Name the passes and values of settings that no measurement had time for."""
        reason = f"not tried: {'interrupted' if ended == 'interrupted' else 'no time left'}"
        self._ablation.note_untried(self._settings.why_untried or reason, stays=not self._safe.stock)
        self._settings.note_untried(reason)

    def _settle(self, chosen: Candidate) -> None:
        """Make the answer of what is faster than stock vLLM and keeps the thresholds, the best first."""
        open_ends = [chosen, *([PLAN] if self._whole_won or self._goal.kind == "limits" else [])]
        refused: set[str] = {self._done.measure.identity(STOCK)}
        while open_ends:
            candidate = open_ends.pop(0)
            if self._done.measure.why_not(candidate):
                continue
            identity = self._done.measure.identity(candidate)
            if candidate == self._safe and candidate != STOCK:
                return
            if identity in refused:
                continue
            refused.add(identity)
            if not self._is_better(candidate):
                continue
            blamed = self._judged(candidate)
            if blamed is None:
                self._safe = candidate
                return
            if blamed:
                need_them = [
                    other for each in self._question.passes if each.name in blamed for other in each.with_passes
                ]
                open_ends.insert(0, candidate.without([*blamed, *need_them]))

    def _is_better(self, candidate: Candidate) -> bool:
        pair = outcome, found = self._done.pair(candidate, STOCK)
        kept, reason = found.is_win, None
        if not kept and not found.is_loss and self._goal.kind == "limits":
            kept = self._goal.is_met(outcome.ours.scores) and not self._goal.is_met(outcome.theirs.scores)
            reason = "keeps the limits, which stock vLLM does not" if kept else None
        self._done.note_pair("result", str(candidate), STOCK, pair, kept=kept, reason=reason)
        return kept

    def _judged(self, candidate: Candidate) -> tuple[str, ...] | None:
        """Return None where the answers are as the profile allows, else the passes to blame."""
        if not self._done.measure.changes_answers(candidate):
            return None
        outcome = self._done.judged(candidate)
        failed = outcome.failed or ", ".join(outcome.failed_metrics)
        reason = f"did not keep {failed}" if failed else "keeps every threshold of the profile"
        if outcome.blamed:
            reason += f"; at fault: {', '.join(outcome.blamed)}"
        reason += f"; {outcome.doubt}" if outcome.doubt else ""
        self._done.note("quality", str(candidate), kept=not failed, reason=reason, seconds=outcome.seconds)
        return outcome.blamed if failed else None


def _with_kept_settings(entries: Sequence[Entry], found: Candidate) -> tuple[Entry, ...]:
    """Return the ledger in which the settings that are in the answer are said to be kept."""
    return tuple(
        dataclasses.replace(each, kept=True, reason="the best of those tried")
        if each.step == "setting" and each.what == str(found) and each.score is not None
        else each
        for each in entries
    )
