"""Says what a quality run measures, and where its files are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.measure.bench.side import Side
from moe_optimizer.measure.quality.probes import Extent
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments

_DIGEST_FILE = "quality.digest"
_DIGEST_BYTES = 64
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
    model: str
    folder: Path
    """Gets answers and the run folders; a run that was stopped goes on from what is there."""
    ready_timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)

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
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = self.folder / _DIGEST_FILE
        if not mark.exists():
            write_atomically(mark, self._digest() + "\n")
        elif read_text(mark, max_bytes=_DIGEST_BYTES).strip() != self._digest():
            raise InputError(
                f"--run-dir: {self.folder} has answers of other plans or texts",
                hint="name another folder, or remove this one",
            )

    def _digest(self) -> str:
        """Return a text that is equal for requests whose answers may be put together."""
        sides = [(side.name, side.url, _served(side)) for side in (self.plan, self.reference)]
        extent = (self.extent.positions, self.extent.generated)
        what = json.dumps([sides, self.texts, extent, self.top_logprobs, self.prompts, self.tasks, self.task_limit])
        return hashlib.sha256(what.encode()).hexdigest()[:16]


def _served(side: Side) -> Sequence[Sequence[str]]:
    """Return what a side's plan serves; its reasons may say something new once this run has judged it."""
    if side.plan is None:
        return ()
    decided = [(each.pass_name, each.status.value, each.value) for each in side.plan.decisions]
    return [side.plan.serve_args.words, *decided]


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
