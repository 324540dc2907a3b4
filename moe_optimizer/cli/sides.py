"""Turns what a user calls a side of a comparison into a server's plan: a profile, a plan's file, stock vLLM, a URL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moe_optimizer import env
from moe_optimizer.cli.measuring_options import BenchOptions, QualityOptions
from moe_optimizer.cli.options import DEFAULT_PORT, PlanOptions
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.errors import InputError
from moe_optimizer.process_environment import changed_environment

if TYPE_CHECKING:
    from moe_optimizer.cli.settings import Settings
    from moe_optimizer.measure.bench.side import Side
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.plan_context.request import PlanRequest

_DEFAULT_PROFILE = "balanced"
_PORT = "--port"
_REQUESTS = "--max-num-seqs"
FILE = ".json"
_WISHES = ("profile", "switches", "require")
"""Options for the first side alone: the second is what it is compared with."""
_NOT_OF_SIDES = ("port", "trust_remote_code")
"""Options that every side is given, or the load generator."""
URL = ("http://", "https://")

_Options = TypeVar("_Options", bound=PlanOptions)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A side that nothing refuses any more."""

    side: Side
    unmeasured: tuple[Settings, PlanRequest] | None = None
    """Of a profile: its plan is made again once its kernels are measured."""


def first_name(options: BenchOptions | QualityOptions) -> str:
    """Return what --plan or --profile calls the first side."""
    return options.plan or options.profile or _DEFAULT_PROFILE


def sides_of(
    options: BenchOptions | QualityOptions,
    names: Sequence[str],
    *,
    run_dir: Path,
    lines: ProgressLines,
    fits: Callable[[str, int], None] = lambda _name, _max_model_len: None,
    measure: bool = True,
) -> tuple[Side, ...]:
    """Return the sides that names mean, each of them `stock`, a URL, a plan's file or a profile.

    Nothing is measured until each of them is known to be one that can be served, or is served, here.

    Args:
        options: the command line, of which all sides are planned.
        names: of the sides, in order; each has a port of its own.
        run_dir: gets the servers' run folders.
        lines: takes what is measured before anything can be planned.
        fits: refuses a side of that name, which takes requests of at most so many tokens.
        measure: whether expert kernels are measured that no table has. A run that goes on has the plans of the one that
            was stopped, and what is measured now would change them.

    Raises:
        MoeOptimizerError: nothing can be planned, or served here, like this.
    """
    _check_reaches_all(options, names)
    options = _as_its_file_was_planned(options, names)
    checked: list[_Checked] = []
    for number, name in enumerate(names):
        each = _checked(options, name, number)
        side = _on_its_own_port(each.side, [other.side for other in checked])
        check_side(side, run_dir=run_dir, fits=fits)
        checked.append(dataclasses.replace(each, side=side))
    # All are planned by the same tables: of what the last of them had measured too.
    for each in checked if measure else ():
        _measure(each, lines)
    return _named_apart([_planned(each) for each in checked])


def _check_reaches_all(options: BenchOptions | QualityOptions, names: Sequence[str]) -> None:
    """Refuse an option that only one of the sides would be given, or none.

    Raises:
        InputError: names it.
    """
    from moe_optimizer.cli.planned_file import refusal, stated_options
    from moe_optimizer.measure.bench.side import STOCK

    if options.plan is not None and options.profile is not None:
        raise InputError("--plan and --profile: both name the first side", hint="leave one of them out")
    file = next((name for name in names if name.endswith(FILE)), None)
    first_is_planned = names[0] != STOCK and not names[0].startswith(URL) and not names[0].endswith(FILE)
    for field, flag in stated_options(options, PlanOptions):
        if field in _NOT_OF_SIDES:
            continue
        if field not in _WISHES:
            if file is not None:
                raise refusal(flag, beside=file)
        elif not first_is_planned:
            raise InputError(f"{flag}: is for the first side, and {names[0]} is not planned here", hint="leave it out")


def _as_its_file_was_planned(
    options: BenchOptions | QualityOptions, names: Sequence[str]
) -> BenchOptions | QualityOptions:
    """Return the options with what the first plan of a file was planned with, so that the other side is too."""
    from moe_optimizer.plan.plan import Plan

    file = next((name for name in names if name.endswith(FILE)), None)
    return options if file is None else planned_alike(options, Plan.load(Path(file)))


def planned_alike(options: _Options, plan: Plan) -> _Options:
    """Return options that plan for the load, the GPUs and with the user's arguments of a plan."""
    from moe_optimizer.plan.serve_args import ServeArguments

    # Each server of a group has a share of the GPUs; another plan shares them out in its own way.
    layout = () if plan.group is None else tuple(plan.decision("parallelism").vllm_args.values)
    arguments: ServeArguments = plan.plain_args.without("--host", _PORT, "--trust-remote-code", *layout)
    load = {} if _REQUESTS in arguments else {"batch_size": plan.workload.batch_size}
    return dataclasses.replace(options, gpus=plan.num_gpus or None, vllm_args=arguments, **load)


def check_side(side: Side, *, run_dir: Path, fits: Callable[[str, int], None]) -> None:
    """Refuse what would fail when the servers of a side are started; leave nothing behind.

    Args:
        side: that is to be served, or answers.
        run_dir: as of `sides_of`.
        fits: as of `sides_of`.

    Raises:
        InputError: an address is taken, the folder cannot be written, or no server answers.
        UnsupportedError: something that is needed is missing.
    """
    from moe_optimizer.launcher import launch
    from moe_optimizer.measure.bench.side import ask

    if side.plan is None:
        assert side.url is not None, "a side has a plan or a URL"
        fits(side.name, ask(side.url).max_model_len)
        return
    # A folder of its own: what is in `run_dir` stays, and the servers' folders are below it.
    launch.check(side.plan, run_dir=run_dir / "check")
    if (length := side.plan.serve_args.count("--max-model-len") or side.plan.model.max_model_len) is not None:
        fits(side.name, length)


def _checked(options: BenchOptions | QualityOptions, what: str, number: int) -> _Checked:
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.planned_file import check_is_for_here
    from moe_optimizer.cli.preflight import check_can_serve_here
    from moe_optimizer.measure.bench.side import STOCK, Side
    from moe_optimizer.near_match import did_you_mean
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.profiles import profile_names

    if what.startswith(URL):
        url = what.rstrip("/").removesuffix("/v1")
        return _Checked(Side(name=f"server {number + 1}", plan=None, url=url))
    if what.endswith(FILE):
        plan = Plan.load(Path(what))
        check_is_for_here(plan, origin=what, model=options.model_name)
        side = Side(name=Path(what).stem, plan=plan)
        return _Checked(side if options.port is None else _on_port(side, options.port + number))
    if what not in (STOCK, *profile_names()) and "/" not in what and not what.endswith((".yaml", ".yml")):
        raise InputError(
            f"{'--against' if number else '--plan or --profile'}: got {what!r}, expected {STOCK}, a profile "
            f"({', '.join(profile_names())}, or a .yaml file), the file of a plan (.json) or a URL",
            hint=did_you_mean(what, (STOCK, *profile_names())),
        )
    options = dataclasses.replace(options, port=(options.port or DEFAULT_PORT) + number)
    if what == STOCK:
        # The switches are wishes for the other side: here they would contradict the one that switches everything off.
        plain = dataclasses.replace(options, switches={}, require=[], strict=False)
        with changed_environment({env.DISABLE: "1"}):
            settings, request = planning.read_request(plain)
            plan = planning.decide(settings, request)
        check_can_serve_here(plan, settings)
        return _Checked(Side(name=STOCK, plan=plan))
    if number:
        options = dataclasses.replace(options, switches={}, require=[])
    settings, request = planning.read_request(dataclasses.replace(options, profile=what))
    plan = planning.decide_before_measuring(request)
    check_can_serve_here(plan, settings)
    switched = [f"{'+' if on else '-'}{name}" for name, on in options.switches.items()]
    return _Checked(Side(name=" ".join([plan.profile_name, *switched]), plan=plan), (settings, request))


def _measure(checked: _Checked, lines: ProgressLines) -> None:
    """Measure the kernels of a side where no table answers, not even one that was just made for another side."""
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.speed_questions import measure_if_needed

    if checked.unmeasured is not None:
        settings, request = checked.unmeasured
        plan = planning.decide_before_measuring(planning.after_measuring(request))
        measure_if_needed(plan, settings["calibrate"], lines)


def _planned(checked: _Checked) -> Side:
    """Return a side with the plan that is served."""
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.preflight import check_can_serve_here

    if checked.unmeasured is None:
        return checked.side
    settings, request = checked.unmeasured
    plan = planning.decide(settings, planning.after_measuring(request))
    check_can_serve_here(plan, settings)
    return dataclasses.replace(checked.side, plan=plan)


def _on_its_own_port(side: Side, others: Sequence[Side]) -> Side:
    """Move a plan of a file to another port where an earlier side has the one it names.

    Raises:
        InputError: as `_on_port`.
    """
    taken = {_port(each.plan) for each in others if each.plan is not None}
    if side.plan is None or _port(side.plan) not in taken:
        return side
    port = next(each for each in range(_port(side.plan) + 1, 1 << 16) if each not in taken)
    return _on_port(side, port)


def _on_port(side: Side, port: int) -> Side:
    """Move a plan of a file to a port.

    Raises:
        InputError: it is of several servers, whose ports belong together.
    """
    from moe_optimizer.plan.serve_args import ServeArguments

    assert side.plan is not None, "a file has a plan"
    if _port(side.plan) == port:
        return side
    if side.plan.group is not None:
        raise InputError(
            f"{side.name}: its router listens on port {_port(side.plan)}, and cannot be moved to {port}",
            hint="plan it again with another --port",
        )
    arguments = side.plan.serve_args.overridden_by(ServeArguments(_PORT, str(port)))
    return dataclasses.replace(side, plan=side.plan.replace(serve_args=arguments))


def _port(plan: Plan) -> int:
    return int(plan.serve_args.value(_PORT) or DEFAULT_PORT)


def _named_apart(sides: list[Side]) -> tuple[Side, ...]:
    """Give two sides of the same name different ones: A against A is a fair question."""
    if len(sides) > 1 and sides[0].name == sides[1].name:
        sides[1] = dataclasses.replace(sides[1], name=f"{sides[1].name} again")
    return tuple(sides)
