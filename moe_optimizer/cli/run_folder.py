"""Chooses the folder of a command that measures: a new one, a named one, or that of the run to go on with."""

from __future__ import annotations

import time
from pathlib import Path

from moe_optimizer.errors import InputError

_RUNS = Path("runs")


def run_folder(named: str | None, command: str, *, resume: bool) -> Path:
    """Return where a run keeps what it measures; a new folder has the time in its name.

    Args:
        named: by --run-dir.
        command: that measures, the beginning of a new folder's name.
        resume: take the newest run of this command below `runs` where no folder is named.

    Raises:
        InputError: there is no run to go on with.
    """
    if named is not None:
        if resume and not (Path(named).is_dir() and any(Path(named).iterdir())):
            raise InputError(f"--resume: there is no run in {named}", hint="leave --resume out")
        return Path(named)
    if not resume:
        return _RUNS / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    if earlier := sorted(path for path in _RUNS.glob(f"{command}-[0-9]*") if path.is_dir()):
        return earlier[-1]
    raise InputError(
        f"--resume: there is no run of {command} in {_RUNS.resolve()}",
        hint="name its folder with --run-dir, or leave --resume out",
    )
