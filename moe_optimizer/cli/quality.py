"""Runs `moe-optimizer quality`: how far a plan's answers are from stock vLLM's, and whether a profile allows it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.measuring_options import QualityOptions
from moe_optimizer.cli.options import DEFAULT_READY_TIMEOUT_S
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.cli.run_folder import run_folder
from moe_optimizer.cli.sides import FILE, URL, first_name, planned_alike, sides_of
from moe_optimizer.errors import ExitCode, InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.measure.bench.side import Side
    from moe_optimizer.measure.quality.request import Alone, QualityRequest
    from moe_optimizer.plan.plan import Plan

_DEFAULT_TOKENS = 8192
_GENERATED = 32
_NOT_ALONE = "parallelism"
"""On both sides: stock vLLM runs on the same devices."""


@takes(QualityOptions)
def command(options: QualityOptions) -> messages.Output:
    """Judge how far a plan's answers are from those of stock vLLM.

    Serves both one after the other and compares their next-token distributions, alone, in batches and in long prompts,
    through the API. Thresholds are the profile's. Exit code 5 if one is not kept; then each pass is measured alone and
    the one at fault is named. With --resume, a stopped run goes on where it was.
    """
    from moe_optimizer.cli import judgement
    from moe_optimizer.measure.bench.side import STOCK
    from moe_optimizer.measure.quality.run import run_quality
    from moe_optimizer.measure.quality.table import render

    lines = ProgressLines(verbose=options.verbose)
    request = request_of(options, lines)
    lines.release()
    with progress_bar("quality", lines=lines, folder=request.folder) as show:
        result = run_quality(request, on_step=show)
    notes = ()
    if result.reference == STOCK:
        notes = (f"plans that serve the same will say so: {judgement.keep(request.judged_plan, result)}",)
    code = ExitCode.QUALITY_FAILED if result.failed else ExitCode.OK
    return messages.Output(result=result, render=render, notes=notes, code=code)


def request_of(options: QualityOptions, lines: ProgressLines, sides: tuple[Side, Side] | None = None) -> QualityRequest:
    """Return what a command line asks to judge.

    Args:
        options: the command line.
        lines: takes what is measured before anything can be planned.
        sides: the one that is judged and its reference; None: those that the options name.

    Raises:
        MoeOptimizerError: an option is wrong, or nothing can be planned, or served here, like this.
    """
    from moe_optimizer.measure.bench.run import environment_of
    from moe_optimizer.measure.corpus import prompts_of, shipped_texts, text_of
    from moe_optimizer.measure.quality.probes import Extent
    from moe_optimizer.measure.quality.request import VLLMS_TOP, QualityRequest
    from moe_optimizer.measure.quality.tasks import check_tasks
    from moe_optimizer.profiles.schema import Quality

    tasks = tuple(each.strip() for each in (options.tasks or "").split(",") if each.strip())
    if options.task_limit is not None and not tasks:
        raise InputError("--task-limit: limits the questions of --tasks, and there are none", hint="leave it out")
    if options.task_data is not None and not tasks:
        raise InputError("--task-data: is the data of --tasks, and there are none", hint="leave it out")
    check_tasks(tasks, options.task_data)
    texts = shipped_texts() if options.data is None else text_of(Path(options.data))
    prompts = () if options.prompts is None else prompts_of(Path(options.prompts))
    folder = run_folder(options.run_dir, "quality", resume=options.resume)
    plan, reference = sides or _sides(options, folder, lines)
    assert plan.plan is not None, "a URL is refused"
    settings = Quality.model_validate_json(json.dumps(plan.plan.profile.get("quality", {}))).model_dump()
    top = settings.pop("top_logprobs")
    alone, not_alone = _alone(options, plan.plan)
    return QualityRequest(
        plan=plan,
        reference=reference,
        alone=alone,
        not_alone=not_alone,
        always_alone=options.per_pass,
        texts=texts,
        extent=Extent(positions=options.tokens or _DEFAULT_TOKENS, generated=_GENERATED),
        top_logprobs=min(top, VLLMS_TOP) if reference.url else top,
        thresholds=settings,
        prompts=prompts,
        tasks=tasks,
        task_limit=options.task_limit,
        task_data=options.task_data,
        model=options.model_name,
        folder=folder,
        ready_timeout_s=options.ready_timeout or DEFAULT_READY_TIMEOUT_S,
        environment=environment_of(plan.plan),
    )


def _sides(options: QualityOptions, folder: Path, lines: ProgressLines) -> tuple[Side, Side]:
    """Return the side that is judged and its reference.

    Raises:
        MoeOptimizerError: as `sides_of`; a URL is to be judged, or the embedded engine is no reference here.
    """
    from moe_optimizer.cli.engine_checks import missing_packages
    from moe_optimizer.measure.bench.side import STOCK, Side
    from moe_optimizer.measure.claimed_folder import is_claimed
    from moe_optimizer.measure.quality.request import EMBEDDED

    judged, measure = first_name(options), not is_claimed(folder, command="quality")
    if judged.startswith(URL):
        raise InputError("--plan: got a URL, expected the file of a plan", hint="judge a server with --against URL")
    if options.against != EMBEDDED:
        names = (judged, options.against or STOCK)
        plan, reference = sides_of(options, names, run_dir=folder, lines=lines, measure=measure)
        return plan, reference
    if absent := missing_packages():
        raise UnsupportedError(f"not installed: {', '.join(absent)}", hint="run: pip install 'moe-optimizer[engine]'")
    for flag, value in (("--prompts", options.prompts), ("--tasks", options.tasks)):
        if value is not None:
            raise InputError(f"{flag}: the embedded engine is a reference for distributions alone", hint="leave it out")
    (plan,) = sides_of(options, (judged,), run_dir=folder, lines=lines, measure=measure)
    return plan, Side(name=EMBEDDED, plan=None)


def _alone(options: QualityOptions, plan: Plan) -> tuple[Mapping[str, Alone], Mapping[str, str]]:
    """Return for each pass that is on a plan with nothing else on, and why there is none."""
    from moe_optimizer.cli import planning
    from moe_optimizer.errors import MoeOptimizerError
    from moe_optimizer.measure.bench.side import Side
    from moe_optimizer.measure.quality.request import Alone
    from moe_optimizer.passes.registry import PASS_NAMES, needed_by
    from moe_optimizer.plan.decision import Applier, Status, Wish
    from moe_optimizer.profiles.schema import Profile

    on = {each.pass_name: each for each in plan.decisions if each.is_optimization}
    found: dict[str, Alone] = {}
    why_not: dict[str, str] = {}
    if options.plan is not None and options.plan.endswith(FILE):
        options = planned_alike(options, plan)
    settings, request = planning.read_request(dataclasses.replace(options, require=[]))
    request = planning.after_measuring(request)
    profile = Profile.model_validate_json(json.dumps(plan.profile))
    for name, decision in on.items():
        if decision.applier is Applier.SERVERS:
            why_not[name] = "it is several servers"
            continue
        needed = tuple(each for each in needed_by(name, "cuda" if plan.num_gpus else "cpu") if each in on)
        off = {each: (Wish.OFF, "quality") for each in PASS_NAMES if each not in (name, *needed, _NOT_ALONE)}
        wishes = {key: wish for key, wish in request.wishes.items() if key.partition(".")[0] in (name, *needed)}
        wished = dict.fromkeys((name, *needed), (Wish.ON, "quality"))
        try:
            made = planning.decide(
                settings,
                dataclasses.replace(request, profile=profile, wishes=wishes | wished | off, required=frozenset()),
            )
        except MoeOptimizerError as error:
            why_not[name] = str(error)
            continue
        if made.decision(name).status is not Status.ON:
            why_not[name] = made.decision(name).reason
            continue
        found[name] = Alone(side=Side(name=f"only {name}", plan=made), with_passes=needed, value=decision.value)
    return found, why_not
