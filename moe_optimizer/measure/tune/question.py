"""Says what a tuning searches for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_optimizer.measure.expected_gains import ExpectedGain
from moe_optimizer.measure.tune.goal import Goal
from moe_optimizer.measure.tune.settings import Settings


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
