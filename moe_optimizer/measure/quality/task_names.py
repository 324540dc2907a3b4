"""Asks lm-evaluation-harness which tasks it has: a wrong name is refused before a server starts.

    python -m moe_optimizer.measure.quality.task_names REQUEST EVENTS

The harness is imported in a process of its own, as in `tasks`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.measure.process import OnStep, answer_request, run_measurement
from moe_optimizer.near_match import did_you_mean

_MODULE = "moe_optimizer.measure.quality.task_names"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesRequest:
    """Names of tasks."""

    tasks: tuple[str, ...]


def check_task_names(tasks: Sequence[str]) -> None:
    """Refuse names that are no task, group or tag of the harness.

    Raises:
        InputError: names the first.
        MeasurementError: the harness cannot be imported; its last lines are in the message.
    """
    if not tasks:
        return
    with tempfile.TemporaryDirectory() as folder:
        request = NamesRequest(tasks=tuple(tasks))
        run_measurement(_MODULE, request, on_step=lambda _share, _text: None, log=Path(folder) / "names.log")


def look_up(request: NamesRequest, on_step: OnStep) -> int:
    """Look each name up in the harness's index; return how many it has."""
    from lm_eval.tasks import TaskManager

    on_step(0.0, "names of tasks")
    known = frozenset(TaskManager().all_tasks)
    for each in request.tasks:
        if each not in known:
            raise InputError(
                f"--tasks: got {each!r:.80}, expected a task of lm-evaluation-harness or a .yaml file",
                hint=did_you_mean(each, known) or "`lm-eval ls tasks` lists them",
            )
    return len(known)


if __name__ == "__main__":
    sys.exit(answer_request(NamesRequest, sys.argv[1:], look_up))
