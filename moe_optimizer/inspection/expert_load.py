"""Reads expert loads: one file, those of a run folder, or those that a profile or a flag names."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text
from moe_optimizer.plan.json_codec import decode_text
from moe_optimizer.specs.expert_load import (
    PARTS_DIR,
    SCHEMA_VERSION,
    ExpertLoad,
    LoadFile,
    PlacementLoad,
    merge_expert_loads,
)

PROFILE_KEY = "passes.expert_placement.load"
_MAX_FILE_BYTES = 1 << 24
"""Chosen: four times what a model of 100 layers with 1024 experts writes. Parsing can cost thirty times the text."""


def read_run_load(run_dir: Path) -> ExpertLoad:
    """Return what the processes of the server in `run_dir`, or of the servers in its folders, have counted so far.

    Raises:
        InputError: nothing was counted there, or a file is not of this kind.
    """
    own = sorted((run_dir / PARTS_DIR).glob("*.json"))
    parts = [read_expert_load(path) for path in own or sorted(run_dir.glob(f"*/{PARTS_DIR}/*.json"))]
    if not parts:
        raise InputError(
            f"{run_dir}: no expert load, expected {PARTS_DIR}/*.json",
            hint="serve with --enable-expert-load, and send requests",
        )
    return merge_expert_loads(parts)


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
    placed_by = _read_named(path, origin)
    if check_path is None:
        return PlacementLoad(placed_by=placed_by, checked_on=None)
    checked_on = _read_named(check_path, check_origin)
    if checked_on.load == placed_by.load:
        raise InputError(f"{check_origin}: {check_path} is the same load as {path}, expected other traffic")
    return PlacementLoad(placed_by=placed_by, checked_on=checked_on)


def _read_named(path: str, origin: str) -> LoadFile:
    if not path:
        raise InputError(f"{origin}: got '', expected a file")
    try:
        return LoadFile(path=path, load=read_expert_load(Path(path)))
    except InputError as error:
        raise error.named_by(origin) from None


def read_expert_load(path: Path) -> ExpertLoad:
    """Read one file.

    Raises:
        InputError: it cannot be read, or is not an expert load; the message names the field.
    """
    return parse_expert_load(read_text(path, max_bytes=_MAX_FILE_BYTES), origin=str(path))


def parse_expert_load(text: str, *, origin: str) -> ExpertLoad:
    """Return the expert load that `text` (JSON) is.

    Raises:
        InputError: it is none; the message names `origin` and the field.
    """
    return decode_text(ExpertLoad, text, origin=origin, schema_version=SCHEMA_VERSION)
