"""Defines what a tuning says in the end: each thing that was tried, kept or rejected, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Step = Literal["plan", "ablation", "setting", "confirmation", "result", "quality", "triton", "unfinished"]
Ended = Literal["done", "budget", "interrupted"]
NOTHING_COMPARED = "none: nothing was compared"
"""Stands for a plan in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that was tried, or not, and what came of it."""

    step: Step
    what: str
    """The pass, the settings or the plan that was tried."""
    against: str
    """What it was compared with; "" for nothing."""
    kept: bool
    reason: str
    verdict: str | None = None
    """None: it was not compared."""
    ratio: float | None = None
    """By the goal's metric; above 1 is better."""
    low: float | None = None
    high: float | None = None
    """Of the interval of the ratio (95 %)."""
    score: float | None = None
    """Median over the repetitions; None: not measured."""
    predicted: float | None = None
    """Gain that the plan modelled of this pass, in a metric of its own; None: it states none."""
    predicted_metric: str | None = None
    no_prediction: str = ""
    """Why the plan models no gain of this pass."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """What came nearest to limits that nothing keeps."""

    what: str
    score: float
    """Worst p99 over its limit."""
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What `moe-optimizer tune --json` prints."""

    goal: str
    metric: str
    """What scores are."""
    met: bool
    """Whether the limits are kept; for a goal without limits, whether anything was compared."""
    nearest_miss: NearestMiss | None
    plan: str
    """What the plan is: in words."""
    plan_file: str | None
    """None: nothing was compared."""
    plan_digest: str | None
    passes: tuple[str, ...]
    """Those that are on in it."""
    arguments: Mapping[str, str]
    """Of `vllm serve`, that were found."""
    ended: Ended
    budget_s: float
    spent_s: float
    entries: tuple[Entry, ...]
    environment: Mapping[str, str]
    command: tuple[str, ...] = ()
    """That made it; empty in older ledgers."""
    date: str = ""
    """When it ended: ISO 8601 with a UTC offset."""
