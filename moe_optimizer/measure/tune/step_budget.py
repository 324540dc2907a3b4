"""Divides the time of a tuning between its steps: what each may take, and what must be left for those after it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.measure.tune.journal import Journal

TRITON_SHARE = 0.25
"""Of the budget on GPUs, for launch parameters of vLLM's Triton kernel where it runs (chosen). The steps below share
what it leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """What one step may take."""

    kind: str
    """Of its measurements."""
    then: tuple[str, ...]
    """Measurements without which one of this step is worth nothing: time is left for them."""
    until: float = 1.0
    """Share of the budget after which it starts nothing more where the step after it has something to try."""

    def why_not(self, journal: Journal, *, judged: bool, next_waits: bool = False) -> str:
        """Return why no further measurement of the step is started; "" where one is.

        Args:
            journal: has the time that is spent and left.
            judged: whether the answers are to be judged in the end.
            next_waits: whether the step after this one has something to try.
        """
        kinds = (self.kind, *self.then, *(["judged"] if judged else []))
        if not journal.has_room(*kinds):
            needed = sum(map(journal.estimate_s, kinds))
            return f"no time left: it takes {needed:.0f} s with what must follow, {journal.left_s:.0f} s are left"
        if next_waits and journal.spent_s > self.until * journal.budget_s:
            return f"{self.until:.0%} of the budget is spent, the rest is for the next step"
        return ""


ABLATION = StepBudget(kind="ablated", then=("paired",), until=0.75)
"""Each pass, then the result. Chosen: settings get a quarter at least."""
SETTING = StepBudget(kind="alone", then=("paired", "paired"))
"""Each, then its confirmation and the result."""
CONFIRMATION = StepBudget(kind="paired", then=("paired",))
"""Then the result."""
