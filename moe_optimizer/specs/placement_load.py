"""Holds the measured load that experts are placed by, and the one that tells how good the placement is."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.specs.expert_load import ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFile:
    """One expert load and where it was read."""

    path: str
    load: ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLoad:
    """One or two stretches of traffic."""

    placed_by: LoadFile
    checked_on: LoadFile | None
    """Other traffic than `placed_by`: a placement always looks good on the load that it was made for."""
