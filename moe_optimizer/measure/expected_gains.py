"""Lists what the decisions of a plan are expected to gain, to stand beside what is measured."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.plan.decision import Decision, Status
from moe_optimizer.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGain:
    """What one pass that is on is expected to gain by itself, in a metric of its own."""

    pass_name: str
    ratio: float | None
    """Above 1 is better; None: no gain is modelled."""
    metric: str
    """"" without a ratio."""
    why_none: str
    """"" with one."""

    def __str__(self) -> str:
        return f"none modelled: {self.why_none}" if self.ratio is None else f"{self.ratio:.2f}x {self.metric}"


def expected_gains(plan: Plan) -> tuple[ExpectedGain, ...]:
    """Return the expectation of each pass that is on."""
    return tuple(expected_gain(each) for each in plan.decisions if each.status is Status.ON)


def expected_gain(decision: Decision) -> ExpectedGain:
    """Return the expectation of one pass."""
    gain = decision.gain
    return ExpectedGain(
        pass_name=decision.pass_name,
        ratio=None if gain is None else gain.ratio.value,
        metric="" if gain is None else gain.metric,
        why_none=decision.no_gain,
    )
