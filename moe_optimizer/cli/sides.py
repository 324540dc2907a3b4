"""Turns what a user calls a side of a comparison into a server's plan: a profile, a plan's file, stock vLLM, a URL."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer import env
from moe_optimizer.cli.measuring_options import BenchOptions, QualityOptions
from moe_optimizer.cli.options import DEFAULT_PORT
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.process_environment import changed_environment

if TYPE_CHECKING:
    from moe_optimizer.measure.bench.side import Side

_DEFAULT_PROFILE = "balanced"
_URL = ("http://", "https://")


def side_of(options: BenchOptions | QualityOptions, what: str, *, number: int, lines: ProgressLines) -> Side:
    """Return the side that a name means: `stock`, a URL, a plan's file or a profile.

    Raises:
        MoeOptimizerError: nothing can be planned, or served here, like this.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.preflight import check_can_serve_here
    from moe_optimizer.cli.speed_questions import measure_if_needed
    from moe_optimizer.measure.bench.side import STOCK, Side
    from moe_optimizer.plan.plan import Plan

    if what.startswith(_URL):
        return Side(name=f"server {number + 1}", plan=None, url=what.rstrip("/").removesuffix("/v1"))
    if what.endswith(".json"):
        return Side(name=Path(what).stem, plan=Plan.load(Path(what)))
    options = dataclasses.replace(options, port=(options.port or DEFAULT_PORT) + number)
    if what == STOCK:
        # The switches are wishes for the other side: here they would contradict the one that switches everything off.
        plain = dataclasses.replace(options, switches={}, require=[], strict=False)
        with changed_environment({env.DISABLE: "1"}):
            settings, request = planning.read_request(plain)
    else:
        settings, request = planning.read_request(dataclasses.replace(options, profile=what))
        measure_if_needed(planning.decide_before_measuring(request), settings["calibrate"], lines)
        request = planning.after_measuring(request)
    plan = planning.decide(settings, request)
    check_can_serve_here(plan, settings)
    return Side(name=STOCK if what == STOCK else plan.profile_name, plan=plan)


def first_side(options: BenchOptions | QualityOptions, *, lines: ProgressLines) -> Side:
    """Return the side of --plan or --profile.

    Raises:
        MoeOptimizerError: as `side_of`.
    """
    return side_of(options, options.plan or options.profile or _DEFAULT_PROFILE, number=0, lines=lines)


def named_apart(sides: list[Side]) -> tuple[Side, ...]:
    """Give two sides of the same name different ones: A against A is a fair question."""
    if len(sides) > 1 and sides[0].name == sides[1].name:
        sides[1] = dataclasses.replace(sides[1], name=f"{sides[1].name} again")
    return tuple(sides)
