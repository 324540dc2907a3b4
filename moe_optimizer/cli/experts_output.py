"""What `experts --json` prints."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.costs.expert_imbalance import LoadReport
from moe_optimizer.specs.expert_load import ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOutput:
    """The counts and what they say."""

    load: ExpertLoad
    """The counts, as in the file expert_load.json."""
    report: LoadReport
    """Their figures."""
