"""Reads everything that a report can show: a run folder, or files that other commands wrote."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_json
from moe_optimizer.inspection.expert_load import read_run_load
from moe_optimizer.measure.bench.result import RESULT_FILE, BenchResult
from moe_optimizer.measure.decode_step.ledger import Ledger
from moe_optimizer.measure.quality.result import QualityResult
from moe_optimizer.measure.tune.ledger import TuneResult
from moe_optimizer.plan.json_codec import decode
from moe_optimizer.plan.plan import PLAN_FILE, Plan
from moe_optimizer.proof.record import PROOF_DIR, Proof, read_proofs
from moe_optimizer.specs.expert_load import ExpertLoad

_MAX_BYTES = 64 << 20
_OF_A_RECORD = frozenset({"what", "commit", "dirty", "note"})
"""Fields of a record that a result does not have."""
_DEEPEST = 3
"""Folders below a benchmark's: the start of a side, and a server of a group."""
_HINT = (
    "a report is made of a run folder, or of what bench, quality, tune, measure step, plan or experts print with "
    "--json (or wrote to a folder)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan, and what the processes wrote that ran by it."""

    title: str
    plan: Plan
    proofs: tuple[Proof, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What there is to show; empty or None where no file says it."""

    runs: tuple[Run, ...] = ()
    """Each plan once."""
    bench: BenchResult | None = None
    ledgers: tuple[tuple[Ledger, Ledger], ...] = ()
    """Of each batch: stock vLLM's, and the plan's."""
    quality: QualityResult | None = None
    tuning: TuneResult | None = None
    load: ExpertLoad | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan that the report is about: the first one that changes anything."""
        changing = [run.plan for run in self.runs if run.plan.plugin_decisions or run.plan.serve_env]
        return next(iter([*changing, *(run.plan for run in self.runs)]), None)


@dataclass(slots=True)
class _Found:
    runs: dict[str, Run] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def add_run(self, title: str, plan: Plan, proofs: Sequence[Proof]) -> None:
        """Keep a plan once, with the proofs of its first run that has some."""
        if plan.digest not in self.runs or not self.runs[plan.digest].proofs:
            self.runs[plan.digest] = Run(title=title, plan=plan, proofs=tuple(proofs))


def read_inputs(sources: Sequence[Path]) -> Inputs:
    """Return what run folders and files say together; of two of a kind, the last.

    Raises:
        InputError: a source does not exist, holds nothing to report, or a file in it cannot be read.
    """
    found = _Found()
    for source in sources:
        if source.is_dir():
            _read_folder(source, found)
        else:
            _read_file(source, found)
    return Inputs(runs=tuple(found.runs.values()), **found.rest)


def _read_folder(folder: Path, found: _Found) -> None:
    before = len(found.runs) + len(found.rest)
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(_UnknownFileError):
            _read_file(path, found)
    for depth in range(_DEEPEST):
        for plan_path in sorted(folder.glob("/".join(["*"] * depth + [PLAN_FILE]))):
            _read_run(plan_path, folder, found)
    with contextlib.suppress(InputError):
        found.rest["load"] = _load_below(folder)
    if len(found.runs) + len(found.rest) == before:
        raise InputError(f"{folder}: nothing to report: no {PLAN_FILE}, {RESULT_FILE} or other result", hint=_HINT)


def _read_run(plan_path: Path, folder: Path, found: _Found) -> None:
    plan = Plan.load(plan_path)
    name = plan_path.parent.relative_to(folder)
    title = plan.profile_name if str(name) == "." else f"{plan.profile_name} ({name})"
    # The servers of a group write their proofs into folders of their own.
    folders = [plan_path.parent, *(path.parent for path in sorted(plan_path.parent.glob(f"*/{PROOF_DIR}")))]
    found.add_run(title, plan, [proof for each in folders for proof in read_proofs(each)])


def _load_below(folder: Path) -> ExpertLoad:
    """Return the load of a run folder, or of the first start of a benchmark that counted one.

    Raises:
        InputError: nothing was counted.
    """
    for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        with contextlib.suppress(InputError):
            return read_run_load(candidate)
    raise InputError(f"{folder}: nothing was counted")


class _UnknownFileError(InputError):
    """A JSON file that no reader knows."""


def _read_file(path: Path, found: _Found) -> None:
    content = read_json(path, max_bytes=_MAX_BYTES)
    for keys, read in _KINDS:
        if isinstance(content, dict) and keys <= content.keys():
            read(content, str(path), found)
            return
    raise _UnknownFileError(f"{path}: not a result that a report can show", hint=_HINT)


def _read_plan(content: dict[str, Any], origin: str, found: _Found) -> None:
    plan = Plan.from_json(json.dumps(content), origin=origin)
    found.add_run(plan.profile_name, plan, ())


def _read_bench(content: dict[str, Any], origin: str, found: _Found) -> None:
    found.rest["bench"] = decode(BenchResult, _without_head(content), origin=origin)


def _without_head(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a record holds beside the fields that every record has (benchmarks/record.schema.json)."""
    return {key: value for key, value in content.items() if key not in _OF_A_RECORD}


def _read_steps(content: dict[str, Any], origin: str, found: _Found) -> None:
    """Read what `measure step --json` prints, or a record of the same."""
    sides = content.get("sides", content)
    both = [[_ledger(each, f"{origin}: {side}") for each in sides[side]["ledgers"]] for side in ("stock", "ours")]
    found.rest["ledgers"] = tuple(zip(*both, strict=True))


def _ledger(content: dict[str, Any], origin: str) -> Ledger:
    return decode(Ledger, content, origin=origin)


def _read_quality(content: dict[str, Any], origin: str, found: _Found) -> None:
    found.rest["quality"] = decode(QualityResult, _without_head(content), origin=origin)


def _read_tuning(content: dict[str, Any], origin: str, found: _Found) -> None:
    found.rest["tuning"] = decode(TuneResult, _without_head(content), origin=origin)


def _read_load(content: dict[str, Any], origin: str, found: _Found) -> None:
    found.rest["load"] = decode(ExpertLoad, content.get("load", content), origin=origin)


_KINDS: tuple[tuple[set[str], Callable[[dict[str, Any], str, _Found], None]], ...] = (
    ({"decisions", "memory", "profile_name"}, _read_plan),
    ({"sides", "verdicts", "environment"}, _read_bench),
    ({"kl_mean", "top1_agreement"}, _read_quality),
    ({"goal", "entries", "budget_s"}, _read_tuning),
    ({"stock", "ours", "plan_digest"}, _read_steps),
    ({"sides", "plan_digest", "commit"}, _read_steps),
    ({"layers", "num_experts", "steps", "since"}, _read_load),
    ({"load", "report"}, _read_load),
)
"""Keys that a file has -> its reader."""
