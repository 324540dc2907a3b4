"""Defines the output of `experts --json`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.costs.expert_imbalance import LoadReport
from moe_optimizer.specs.expert_load import ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOutput:
    """The token counts of the experts, and the figures computed from them."""

    load: ExpertLoad
    """The counts, as in the file expert_load.json."""
    report: LoadReport
    """How uneven the counts are."""
