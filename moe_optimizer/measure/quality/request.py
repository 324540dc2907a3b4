"""Says what a quality run measures, and where its files are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_optimizer.measure.bench.side import Side
from moe_optimizer.measure.claimed_folder import claim_folder
from moe_optimizer.measure.quality.probes import Extent
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments

_FLAG = "--max-logprobs"
VLLMS_TOP = 20
"""vLLM's own limit of top log-probabilities, which a server that somebody else started has."""
EMBEDDED = "embedded"
"""The name of the side that is the embedded engine in float32: a reference, not a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One pass of the plan on, every other off."""

    side: Side
    with_passes: tuple[str, ...]
    """Those that it cannot run without."""
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRequest:
    """What to measure."""

    plan: Side
    """Its plan is judged."""
    reference: Side
    alone: Mapping[str, Alone]
    """Pass -> how it is measured alone."""
    not_alone: Mapping[str, str]
    """Passes that cannot be measured alone, and why."""
    always_alone: bool
    """Else passes are measured alone only where the plan fails."""
    texts: tuple[str, ...]
    extent: Extent
    top_logprobs: int
    thresholds: Mapping[str, float | None]
    prompts: tuple[str, ...] = ()
    prompt_tokens: int = 64
    """Generated from each of `prompts`."""
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None
    """Questions of each task; None: all."""
    task_data: str | None = None
    """Folder with the data sets of tasks; None: where the harness finds them."""
    model: str
    folder: Path
    """Gets answers and the run folders; a run that was stopped goes on from what is there."""
    ready_timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    make_room: Callable[[], None] = lambda: None
    """Called before passes are served alone: stops what is up beside them."""

    @property
    def judged_plan(self) -> Plan:
        """The plan that is judged."""
        assert self.plan.plan is not None, "the judged side has a plan"
        return self.plan.plan

    def claim_folder(self) -> None:
        """Create the folder, or take one in which the same run was stopped.

        Raises:
            InputError: another run's answers are there.
        """
        sides = [(side.name, side.url, side.served) for side in (self.plan, self.reference)]
        extent = (self.extent.positions, self.extent.generated)
        tasks = [self.tasks, self.task_limit, *([] if self.task_data is None else [self.task_data])]
        question = [sides, self.texts, extent, self.top_logprobs, self.prompts, *tasks]
        claim_folder(self.folder, question, command="quality")


def telling(side: Side, top_logprobs: int) -> Side:
    """Return a side whose server may tell so many log-probabilities of a position."""
    if side.plan is None:
        return side
    plan, more = side.plan, ServeArguments(_FLAG, str(top_logprobs))
    if _FLAG in plan.serve_args:
        return side
    group = plan.group
    if group is not None:
        servers = tuple(dataclasses.replace(each, serve_args=each.serve_args + more) for each in group.servers)
        group = dataclasses.replace(group, servers=servers)
    changed = plan.replace(serve_args=plan.serve_args + more, plain_args=plan.plain_args + more, group=group)
    return Side(name=side.name, plan=changed, url=side.url)
