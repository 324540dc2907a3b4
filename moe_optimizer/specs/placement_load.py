"""The measured load that experts are placed by, and the one that tells how good the placement is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.specs.expert_load import ExpertLoad, read_expert_load

PROFILE_KEY = "passes.expert_placement.load"


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


def read_placement_load(
    path: str | None, check_path: str | None, *, origin: str = PROFILE_KEY, check_origin: str = f"{PROFILE_KEY}_check"
) -> PlacementLoad | None:
    """Read the files that a profile or the command line names; None where it names none.

    Args:
        path: the load to place by.
        check_path: the load to state the gain on.
        origin: what named `path`, for messages: a flag, or a profile's key.
        check_origin: what named `check_path`.

    Raises:
        InputError: a file cannot be read, or the second is given alone or is the first.
    """
    if path is None:
        if check_path is None:
            return None
        raise InputError(
            f"{check_origin} {check_path!r:.80}: there is no load to place by", hint="give one with --expert-load"
        )
    placed_by = _read(path, origin)
    if check_path is None:
        return PlacementLoad(placed_by=placed_by, checked_on=None)
    checked_on = _read(check_path, check_origin)
    if checked_on.load == placed_by.load:
        raise InputError(f"{check_origin}: {check_path} is the same load as {path}, expected other traffic")
    return PlacementLoad(placed_by=placed_by, checked_on=checked_on)


def _read(path: str, origin: str) -> LoadFile:
    if not path:
        raise InputError(f"{origin}: got '', expected a file")
    try:
        return LoadFile(path=path, load=read_expert_load(Path(path)))
    except InputError as error:
        raise error.named_by(origin) from None
