"""Runs `moe-optimizer bench`: how fast a plan serves a workload, against stock vLLM or another plan or server."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer import env
from moe_optimizer.cli import messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.option_values import positive_numbers, whole_numbers
from moe_optimizer.cli.options import DEFAULT_PORT, DEFAULT_READY_TIMEOUT_S, BenchOptions
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.errors import InputError
from moe_optimizer.process_environment import changed_environment

if TYPE_CHECKING:
    from moe_optimizer.measure.bench.request import BenchRequest
    from moe_optimizer.measure.bench.side import Side

_DEFAULT_REPETITIONS = 5
_MOST_CLIENTS = 65_536
_URL = ("http://", "https://")


@takes(BenchOptions)
def command(options: BenchOptions) -> messages.Output:
    """Measure how fast a model is served, against stock vLLM, another profile or plan, or a running server.

    Starts the servers one after the other, or side by side where both fit, and sends both the same requests in turns.
    A difference is only claimed where the interval shows one. A failed request ends the run without a result.
    Arguments after -- go to vllm serve, on both sides. With --run-dir, a stopped run goes on where it was.
    """
    from moe_optimizer.cli.report import check_report_path, write_report
    from moe_optimizer.measure.bench.run import run_bench
    from moe_optimizer.measure.bench.table import render

    lines = ProgressLines(verbose=options.verbose)
    if options.html is not None:
        check_report_path(Path(options.html))
    request = _request(options, lines)
    with progress_bar("bench", lines=lines) as show:
        result = run_bench(request, on_step=show)
    notes = () if options.html is None else (write_report([request.folder], Path(options.html)),)
    return messages.Output(result=result, render=render, notes=notes)


def _request(options: BenchOptions, lines: ProgressLines) -> BenchRequest:
    from moe_optimizer.measure.bench.request import BenchRequest
    from moe_optimizer.measure.bench.result import Limits
    from moe_optimizer.measure.bench.side import STOCK
    from moe_optimizer.measure.bench.trace import read_trace
    from moe_optimizer.measure.bench.workload import load_workload

    workload, trace = None, ()
    if options.workload.endswith(".jsonl"):
        if options.clients or options.rates:
            raise InputError("--clients and --rates: a trace has arrivals of its own")
        trace = read_trace(Path(options.workload))
    else:
        workload = load_workload(options.workload)
        if options.clients or options.rates:
            clients = () if options.clients is None else whole_numbers("--clients", options.clients, _MOST_CLIENTS)
            rates = () if options.rates is None else positive_numbers("--rates", options.rates)
            if clients and rates:
                raise InputError("--clients and --rates: expected one of them: a closed or an open loop")
            workload = workload.model_copy(update={"clients": clients, "rates": rates})
        if options.requests_per_client is not None:
            workload = workload.model_copy(update={"requests_per_client": options.requests_per_client})
    sides = [_side(options, options.plan or _profile_or_default(options), number=0, lines=lines)]
    if options.against != "":
        sides.append(_side(options, options.against or STOCK, number=1, lines=lines))
    return BenchRequest(
        command=("moe-optimizer", *sys.argv[1:]),
        sides=_named_apart(sides),
        workload_name=options.workload,
        workload=workload,
        trace=trace,
        repetitions=options.repetitions or _DEFAULT_REPETITIONS,
        limits=Limits(ttft_ms=options.ttft, tpot_ms=options.tpot),
        folder=Path(options.run_dir or f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}"),
        tokenizer=options.tokenizer or options.model_name,
        trust_remote_code=options.trust_remote_code,
        ready_timeout_s=options.ready_timeout or DEFAULT_READY_TIMEOUT_S,
    )


def _side(options: BenchOptions, what: str, *, number: int, lines: ProgressLines) -> Side:
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


def _profile_or_default(options: BenchOptions) -> str:
    return options.profile or "balanced"


def _named_apart(sides: list[Side]) -> tuple[Side, ...]:
    """Give two sides of the same name different ones: A against A is a fair question."""
    if len(sides) > 1 and sides[0].name == sides[1].name:
        sides[1] = dataclasses.replace(sides[1], name=f"{sides[1].name} again")
    return tuple(sides)
