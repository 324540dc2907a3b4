"""Compares a plan with itself without each of its passes, and with those that it leaves off."""

from __future__ import annotations

from typing import Any

from moe_optimizer.measure.tune.comparison import Comparison
from moe_optimizer.measure.tune.measurements import Measurements
from moe_optimizer.measure.tune.question import PlannedPass, Question
from moe_optimizer.measure.tune.step_budget import ABLATION
from moe_optimizer.measure.tune.trial import PLAN, STOCK, Candidate


class Ablation:
    """The passes of a plan, each on and off.

    Args:
        question: has the passes.
        measurements: takes and tells what is measured.
    """

    def __init__(self, question: Question, measurements: Measurements) -> None:
        self._passes, self._settings_wait = question.passes, bool(question.settings)
        self._done = measurements
        self._plan_is_stock = measurements.same(PLAN, STOCK)

    def whole(self) -> Comparison:
        """Compare the plan with stock vLLM."""
        pair = self._done.pair(PLAN, STOCK)
        self._done.note_pair("plan", "the plan", STOCK, pair, kept=pair[1].is_win)
        return pair[1]

    def winners(self, *, whole: Comparison) -> Candidate:
        """Return the plan without the passes that do not win, and with those that do though it leaves them off.

        Args:
            whole: the plan compared with stock vLLM.
        """
        if whole.word is None:
            for each in self._passes:
                self._done.note("ablation", each.name, kept=False, reason="not tried: the plan could not be measured")
            return STOCK
        losers: list[str] = []
        for each in self._passes:
            if each.is_on and not self._wins(each, whole_won=whole.is_win):
                losers += [each.name, *each.with_passes]
        return PLAN.without(losers).adding(self.missed())

    def missed(self) -> list[str]:
        """Return the passes that the plan leaves off and that win when they are on."""
        return [each.name for each in self._passes if not each.is_on and self._wins(each, whole_won=False)]

    def note_untried(self, reason: str, *, stays: bool) -> None:
        """Name the passes that no measurement had time for.

        Args:
            reason: why.
            stays: whether the answer is the plan, so that those that are on in it stay on.
        """
        named = {each.what for each in self._done.entries if each.step == "ablation"}
        for each in self._passes:
            if each.name not in named and not (self._plan_is_stock and each.is_on):
                self._done.note("ablation", each.name, kept=each.is_on and stays, reason=reason)

    def _wins(self, planned: PlannedPass, *, whole_won: bool) -> bool:
        """Compare the plan with the pass and without it."""
        facts = _predicted(planned)
        changed = PLAN.without([planned.name, *planned.with_passes]) if planned.is_on else PLAN.adding([planned.name])
        if why := planned.why_unjudged or self._why_not_compared(changed, "without" if planned.is_on else "with"):
            self._done.note("ablation", planned.name, kept=planned.is_on, reason=why, **facts)
            return planned.is_on
        ours, theirs = (PLAN, changed) if planned.is_on else (changed, PLAN)
        if planned.is_on and self._done.same(changed, STOCK):
            theirs = STOCK
        # The whole plan was compared with stock vLLM: that takes no time.
        known = theirs is STOCK
        why = "" if known else self._done.why_no_time(ABLATION, of=ours, next_waits=self._settings_wait)
        if why:
            shown = "is faster than stock vLLM" if whole_won else "showed no gain"
            reason = f"not measured alone; the plan with it {shown}; {why}" if planned.is_on else f"not tried: {why}"
            self._done.note("ablation", planned.name, kept=whole_won, reason=reason, **facts)
            return whole_won
        # Where stock vLLM is the plan, the result is this comparison.
        pair = self._done.pair(ours, theirs, kind="paired" if self._plan_is_stock else "ablated")
        wins = whole_won if pair[1].word is None else pair[1].is_win
        also = self._changed_too(planned, changed)
        self._done.note_pair("ablation", planned.name, theirs, pair, kept=wins, also=also, **facts)
        return wins

    def _changed_too(self, planned: PlannedPass, changed: Candidate) -> str:
        """Return which other passes the planner decides otherwise for its sake; "" where none."""
        before, after = map(self._done.measure.on, (PLAN, changed))
        word, named = "without" if planned.is_on else "with", {planned.name, *planned.with_passes}
        found = {"on": after - before - named, "off": before - after - named}
        return "; ".join(f"{word} it {', '.join(sorted(names))} is {how}" for how, names in found.items() if names)

    def _why_not_compared(self, changed: Candidate, word: str) -> str:
        if why := self._done.measure.why_not(changed):
            return f"there is no plan {word} it: {why}"
        return "changes nothing here" if self._done.same(changed, PLAN) else ""


def _predicted(planned: PlannedPass) -> dict[str, Any]:
    """Return what a line of the ledger says of the gain that the plan modelled."""
    if (expected := planned.expected) is None:
        return {}
    return {
        "predicted": expected.ratio,
        "predicted_metric": expected.metric or None,
        "no_prediction": expected.why_none,
    }
