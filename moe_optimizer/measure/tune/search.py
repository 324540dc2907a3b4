"""Searches for the best plan: first which passes win, then which settings; nothing that did not win stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_optimizer.measure.expected_gains import ExpectedGain
from moe_optimizer.measure.tune.comparison import Comparison, compared, median_score
from moe_optimizer.measure.tune.goal import Goal
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.ledger import Ended, Entry, NearestMiss, Step
from moe_optimizer.measure.tune.setting_search import SettingSearch
from moe_optimizer.measure.tune.settings import UNCHANGED, Settings, arguments_of
from moe_optimizer.measure.tune.step_budget import ABLATION, CONFIRMATION, SETTING, StepBudget
from moe_optimizer.measure.tune.trial import STOCK, BudgetSpentError, Candidate, Measure, Outcome, Trial, words

_MOST_FAILURES = 3
"""Settings in a row without a result, before any candidate has one: no setting makes such a server start."""
_MOST_REPEATS = 20
"""Settings in a row that were tried before: the sampler has nothing new to say."""
_BEST = Candidate()
"""The plan as it was made, with everything on that was planned."""

OnStep = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """A pass that is on in the plan and can be switched off, or off and can be switched on."""

    name: str
    is_on: bool = True
    with_passes: tuple[str, ...] = ()
    """Passes that cannot run without it: they are off with it."""
    expected: ExpectedGain | None = None
    why_unjudged: str = ""
    """Why these requests cannot tell whether it wins; "" where they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to search for."""

    goal: Goal
    passes: Sequence[PlannedPass]
    settings: Settings = field(default_factory=dict)
    seed: int = 0
    most_trials: int = 64
    """Of settings."""


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
    return _Search(question, measure, journal, on_step).run()


class _Search:
    def __init__(self, question: Question, measure: Measure, journal: Journal, on_step: OnStep) -> None:
        self._question, self._goal = question, question.goal
        self._measure, self._journal, self._on_step = measure, journal, on_step
        self._entries: list[Entry] = []
        self._trials: dict[str, tuple[Candidate, Trial]] = {}
        self._safe = STOCK
        """What the search would answer if it ended now."""
        self._whole_won = False
        self._left_out = False
        """Whether something was not tried for lack of time."""
        self._untried = {flag: {*values} - {UNCHANGED} for flag, values in question.settings.items()}
        self._why_untried = ""
        self._under_way: tuple[str, str, tuple[str, ...]] | None = None
        """What is being measured: in words, and as the journal has it."""
        self._last_failure = ""
        self._counted: set[tuple[str, ...]] = set()
        """Measurements whose time a line of the ledger has."""

    def run(self) -> Found:
        """Take all steps; each can be the last."""
        ended: Ended = "done"
        try:
            self._search()
            ended = "budget" if self._left_out else "done"
        except BudgetSpentError:
            ended = "budget"
            reason = "the budget did not last for it"
            if not self._trials:
                reason += ": give it a larger --budget, or less of --clients, --requests-per-client or --repetitions"
            self._note_unfinished(reason)
        except (KeyboardInterrupt, SystemExit):
            ended = "interrupted"
            self._note_unfinished("interrupted")
        self._note_untried(ended)
        answer = self._trials.get(self._identity(self._safe))
        alone = bool(self._trials) or not self._last_failure
        compared = len(self._trials) > 1 or (ended == "done" and alone)
        met = compared and self._goal.is_met(answer[1].scores if answer else ())
        return Found(
            candidate=self._safe,
            met=met,
            compared=compared,
            nearest_miss=None if met else self._nearest(),
            entries=_with_kept_settings(self._entries, self._safe),
            ended=ended,
            why_nothing="" if self._trials else self._last_failure,
        )

    def _search(self) -> None:
        if self._identity(_BEST) == self._identity(STOCK):
            self._note("plan", "the plan", kept=False, reason="changes nothing: it is stock vLLM")
            winners = self._winners()
            chosen = _BEST.adding(winners) if winners else STOCK
        else:
            chosen = self._ablated()
        if why := self._measure.why_not(chosen):
            self._note("ablation", str(chosen), kept=False, reason=f"there is no such plan: {why}")
            chosen = _BEST
        chosen = self._with_settings(chosen)
        self._settle(chosen)

    def _note_unfinished(self, reason: str) -> None:
        if self._under_way is None:
            self._note("unfinished", "the next step", kept=False, reason=reason)
            return
        text, kind, what = self._under_way
        seconds = self._journal.cut_off_s(kind, what)
        self._note("unfinished", text, kept=False, reason=reason, seconds=seconds)

    def _note_untried(self, ended: Ended) -> None:
        """Name the passes and values of settings that no measurement had time for."""
        reason = f"not tried: {self._why_untried or ('interrupted' if ended == 'interrupted' else 'no time left')}"
        named = {each.what for each in self._entries if each.step == "ablation"}
        for each in self._question.passes:
            if each.name not in named and (self._identity(_BEST) != self._identity(STOCK) or not each.is_on):
                self._note("ablation", each.name, kept=each.is_on and not self._safe.stock, reason=reason)
        for flag, values in self._question.settings.items():
            if left := [value for value in values if value in self._untried[flag]]:
                what = ", ".join((words(flag, left[0]), *left[1:]))
                self._note("setting", what, kept=False, reason=reason)

    # Passes

    def _ablated(self) -> Candidate:
        """Return the plan without the passes that do not win, and with those that do though it leaves them off."""
        outcome, whole = self._pair(_BEST, STOCK)
        self._compare("plan", "the plan", STOCK, outcome, whole, kept=whole.is_win)
        if whole.word is None:
            for each in self._question.passes:
                self._note("ablation", each.name, kept=False, reason="not tried: the plan could not be measured")
            return STOCK
        self._whole_won = whole.is_win
        if whole.is_win:
            self._settle_if_right(_BEST)
        losers: list[str] = []
        for each in self._question.passes:
            if each.is_on and not self._wins(each, whole_won=whole.is_win):
                losers += [each.name, *each.with_passes]
        return _BEST.without(losers).adding(self._winners())

    def _winners(self) -> list[str]:
        """Return the passes that the plan leaves off and that win when they are on."""
        return [each.name for each in self._question.passes if not each.is_on and self._wins(each, whole_won=False)]

    def _wins(self, planned: PlannedPass, *, whole_won: bool) -> bool:
        """Compare the plan with the pass and without it."""
        word = "without" if planned.is_on else "with"
        changed = _BEST.without([planned.name, *planned.with_passes]) if planned.is_on else _BEST.adding([planned.name])
        ours, theirs = (_BEST, changed) if planned.is_on else (changed, _BEST)
        facts: dict[str, Any] = {}
        if (expected := planned.expected) is not None:
            facts = {
                "predicted": expected.ratio,
                "predicted_metric": expected.metric or None,
                "no_prediction": expected.why_none,
            }
        if planned.why_unjudged:
            self._note("ablation", planned.name, kept=planned.is_on, reason=planned.why_unjudged, **facts)
            return planned.is_on
        if why := self._measure.why_not(changed):
            reason = f"there is no plan {word} it: {why}"
            self._note("ablation", planned.name, kept=planned.is_on, reason=reason, **facts)
            return planned.is_on
        if self._identity(changed) == self._identity(_BEST):
            self._note("ablation", planned.name, kept=planned.is_on, reason="changes nothing here", **facts)
            return planned.is_on
        if why := self._why_no_time(ABLATION, of=ours, next_waits=bool(self._question.settings)):
            shown = "is faster than stock vLLM" if whole_won else "showed no gain"
            reason = f"not measured alone; the plan with it {shown}; {why}" if planned.is_on else f"not tried: {why}"
            self._note("ablation", planned.name, kept=whole_won, reason=reason, **facts)
            return whole_won
        # Where stock vLLM is the plan, the result is this comparison.
        is_stock = self._identity(_BEST) == self._identity(STOCK)
        outcome, found = self._pair(ours, theirs, kind="paired" if is_stock else "ablated")
        if found.word is None:
            self._compare("ablation", planned.name, theirs, outcome, found, kept=whole_won, **facts)
            return whole_won
        self._compare("ablation", planned.name, theirs, outcome, found, kept=found.is_win, **facts)
        return found.is_win

    # Settings

    def _with_settings(self, start: Candidate) -> Candidate:
        """Return the candidate with settings that win against those it has."""
        if not self._question.settings:
            return start
        best = self._tried_settings(start)
        if best is None:
            return start
        if why := self._why_no_time(CONFIRMATION, of=best):
            self._note("confirmation", str(best), kept=False, reason=why)
            return start
        outcome, found = self._pair(best, start)
        self._compare("confirmation", str(best), start, outcome, found, kept=found.is_win)
        return best if found.is_win else start

    def _tried_settings(self, start: Candidate) -> Candidate | None:
        """Try settings while there is time to confirm the best of them; return it where it is not the unchanged one."""
        trials = SettingSearch(
            self._question.settings, higher_is_better=self._goal.higher_is_better, seed=self._question.seed
        )
        seen: set[str] = set()
        scored: list[tuple[float, Candidate]] = []
        repeats = failures = 0
        while True:
            if why := self._why_no_time(SETTING, of=start):
                self._why_untried = why
                break
            if failures == _MOST_FAILURES and not self._trials:
                self._why_untried = "no server has started so far"
                break
            if len(seen) == self._question.most_trials or repeats == _MOST_REPEATS:
                self._why_untried = f"the search has chosen others {len(seen)} times"
                break
            changed = arguments_of(trials.ask())
            for flag, value in changed.items():
                self._untried[flag].discard(value)
            candidate = start.having(changed) if changed else start
            why = self._measure.why_not(candidate)
            identity = str(candidate) if why else self._identity(candidate)
            if identity in seen:
                repeats += 1
                trials.tell(None)
                continue
            seen.add(identity)
            repeats = 0
            if why:
                self._note("setting", str(candidate), kept=False, reason=why)
                trials.tell(None)
                continue
            score = self._scored(candidate, trials)
            if score is not None:
                scored.append((score, candidate))
            else:
                failures += 1
        if not scored:
            return None
        best = (max if self._goal.higher_is_better else min)(scored, key=lambda each: each[0])[1]
        return best if best != start else None

    def _scored(self, candidate: Candidate, trials: SettingSearch) -> float | None:
        outcome = self._measured(
            "alone",
            (self._identity(candidate), str(candidate)),
            f"trying {candidate}",
            lambda: self._measure.alone(candidate, trials.is_hopeless),
        )
        score = None if outcome.pruned else median_score(outcome.ours)
        trials.tell(score, outcome.ours.scores)
        reason = outcome.failed or ("hopeless after the first repetitions" if outcome.pruned else "tried")
        shown = median_score(outcome.ours)
        self._note("setting", str(candidate), kept=False, reason=reason, score=shown, seconds=outcome.seconds)
        if not outcome.failed and not outcome.pruned:
            self._remember(candidate, outcome.ours)
        return score

    # The end

    def _settle(self, chosen: Candidate) -> None:
        """Make the answer of what is faster than stock vLLM and keeps the thresholds, the best first."""
        open_ends = [chosen, *([_BEST] if self._whole_won or self._goal.kind == "limits" else [])]
        refused: set[str] = {self._identity(STOCK)}
        while open_ends:
            candidate = open_ends.pop(0)
            if self._measure.why_not(candidate):
                continue
            identity = self._identity(candidate)
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

    def _settle_if_right(self, candidate: Candidate) -> None:
        """Make a candidate that has won the answer for now, if its answers need no judgement."""
        if not self._measure.changes_answers(candidate):
            self._safe = candidate

    def _is_better(self, candidate: Candidate) -> bool:
        outcome, found = self._pair(candidate, STOCK)
        kept, reason = found.is_win, None
        if not kept and not found.is_loss and self._goal.kind == "limits":
            kept = self._goal.is_met(outcome.ours.scores) and not self._goal.is_met(outcome.theirs.scores)
            reason = "keeps the limits, which stock vLLM does not" if kept else None
        self._compare("result", str(candidate), STOCK, outcome, found, kept=kept, reason=reason)
        return kept

    def _judged(self, candidate: Candidate) -> tuple[str, ...] | None:
        """Return None where the answers are as the profile allows, else the passes to blame."""
        if not self._measure.changes_answers(candidate):
            return None
        outcome = self._measured(
            "judged",
            (self._identity(candidate),),
            f"judging the answers of {candidate}",
            lambda: self._measure.judged(candidate),
        )
        failed = outcome.failed or ", ".join(outcome.failed_metrics)
        reason = f"did not keep {failed}" if failed else "keeps every threshold of the profile"
        if outcome.blamed:
            reason += f"; at fault: {', '.join(outcome.blamed)}"
        self._note("quality", str(candidate), kept=not failed, reason=reason, seconds=outcome.seconds)
        return outcome.blamed if failed else None

    # Measuring and telling

    def _identity(self, candidate: Candidate) -> str:
        return self._measure.identity(candidate)

    def _why_no_time(self, budget: StepBudget, *, of: Candidate, next_waits: bool = False) -> str:
        judged = any(map(self._measure.changes_answers, (_BEST, of)))
        why = budget.why_not(self._journal, judged=judged, next_waits=next_waits)
        self._left_out |= bool(why)
        return why

    def _pair(self, ours: Candidate, theirs: Candidate, *, kind: str = "paired") -> tuple[Outcome, Comparison]:
        outcome = self._measured(
            kind,
            (self._identity(ours), self._identity(theirs)),
            f"{ours} against {theirs}",
            lambda: self._measure.paired(ours, theirs),
        )
        if not outcome.failed:
            self._remember(ours, outcome.ours)
            self._remember(theirs, outcome.theirs)
        return outcome, compared(outcome, self._goal)

    def _remember(self, candidate: Candidate, trial: Trial) -> None:
        self._trials[self._identity(candidate)] = (candidate, trial)

    def _nearest(self) -> NearestMiss | None:
        scored = [(score, *each) for each in self._trials.values() if (score := median_score(each[1])) is not None]
        if not scored:
            return None
        score, candidate, trial = min(scored, key=lambda each: each[0])
        return NearestMiss(what=str(candidate), score=score, figures=trial.figures)

    def _compare(
        self,
        step: Step,
        what: str,
        against: Candidate,
        outcome: Outcome,
        found: Comparison,
        *,
        kept: bool,
        reason: str | None = None,
        **facts: Any,
    ) -> None:
        if reason is None:
            reason = found.failed or ("wins" if found.is_win else f"does not win: {found.word}")
        facts = {**found.fields, **facts, "score": median_score(outcome.ours), "seconds": outcome.seconds}
        self._entries.append(Entry(step=step, what=what, against=str(against), kept=kept, reason=reason, **facts))

    def _note(self, step: Step, what: str, *, kept: bool, reason: str, **facts: Any) -> None:
        self._entries.append(Entry(step=step, what=what, against="", kept=kept, reason=reason, **facts))

    def _measured(self, kind: str, what: tuple[str, ...], text: str, measure: Callable[[], Outcome]) -> Outcome:
        self._on_step(self._journal.share, text)
        self._under_way = (text, kind, what)
        outcome = self._journal.measured(kind, what, measure)
        self._under_way = None
        self._last_failure = outcome.failed or self._last_failure
        if (kind, *what) in self._counted:
            return dataclasses.replace(outcome, seconds=0.0)
        self._counted.add((kind, *what))
        return outcome


def _with_kept_settings(entries: Sequence[Entry], found: Candidate) -> tuple[Entry, ...]:
    """Return the ledger in which the settings that are in the answer are said to be kept."""
    return tuple(
        dataclasses.replace(each, kept=True, reason="the best of those tried")
        if each.step == "setting" and each.what == str(found) and each.score is not None
        else each
        for each in entries
    )
