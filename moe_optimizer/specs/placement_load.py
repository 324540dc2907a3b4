"""The measured load that experts are placed by, and the one that tells how good the placement is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.specs.expert_load import ExpertLoad, read_expert_load


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


def read_placement_load(path: str | None, check_path: str | None) -> PlacementLoad | None:
    """Read the files that a profile or the command line names; None where it names none.

    Raises:
        InputError: a file cannot be read, or the second is given alone or is the first.
    """
    if path is None:
        if check_path is None:
            return None
        raise InputError(
            f"--expert-load-check {check_path!r:.80}: there is no load to place by", hint="give one with --expert-load"
        )
    placed_by = LoadFile(path=path, load=read_expert_load(Path(path)))
    if check_path is None:
        return PlacementLoad(placed_by=placed_by, checked_on=None)
    checked_on = LoadFile(path=check_path, load=read_expert_load(Path(check_path)))
    if checked_on.load == placed_by.load:
        raise InputError(f"--expert-load-check: {check_path} is the same load as {path}, expected other traffic")
    return PlacementLoad(placed_by=placed_by, checked_on=checked_on)
