"""Runs `moe-optimizer bench`: how fast a plan serves a workload, against stock vLLM or another plan or server."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.ablation import ablate
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.embedded import ENGINE
from moe_optimizer.cli.measuring_options import BenchOptions, TrafficOptions
from moe_optimizer.cli.option_values import positive_numbers, whole_numbers
from moe_optimizer.cli.options import DEFAULT_READY_TIMEOUT_S
from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.cli.run_folder import run_folder
from moe_optimizer.cli.sides import first_name, sides_of
from moe_optimizer.errors import InputError

if TYPE_CHECKING:
    from moe_optimizer.measure.bench.request import BenchRequest
    from moe_optimizer.measure.bench.trace import TraceRequest
    from moe_optimizer.measure.bench.workload import Workload

_DEFAULT_REPETITIONS = 5
_TOO_FEW_REPETITIONS = 2
"""Student's distribution with one degree of freedom: an interval is tens of standard errors wide."""
_MOST_CLIENTS = 65_536
_BENCHMARKS_APART = 1_000_000
"""Of so many sets of prompts one is sent to a server that runs already."""
_NUMBER_BYTES = 16


@takes(BenchOptions)
def command(options: BenchOptions) -> messages.Output:
    """Measure how fast a model is served, against stock vLLM, another profile or plan, or a running server.

    Starts the servers one after the other, or side by side where both fit, and sends both the same requests in turns.
    A difference is only claimed where the interval shows one. A failed request ends the run without a result.
    Arguments after -- go to vllm serve, on both sides; beside a plan's file they are refused.
    With --resume, a stopped run goes on where it was.
    With --engine embedded --ablate: from a naive loop up, one optimization of that engine at a time.
    """
    if options.ablate or options.engine == ENGINE:
        return ablate(options)
    from moe_optimizer.cli.report import check_report_path, write_report
    from moe_optimizer.measure.bench.run import run_bench
    from moe_optimizer.measure.bench.table import render
    from moe_optimizer.measure.bench.texts import NO_DRAFTS

    lines = ProgressLines(verbose=options.verbose)
    if options.html is not None:
        check_report_path(Path(options.html))
    request = _request(options, lines)
    if request.repetitions == _TOO_FEW_REPETITIONS and len(request.sides) > 1:
        lines.warn(
            [f"--repetitions {request.repetitions}: so few rounds leave intervals that hardly show a difference"]
        )
    lines.release()
    with progress_bar("bench", lines=lines, folder=request.folder) as show:
        result = run_bench(request, on_step=show)
    notes = () if options.html is None else (write_report([request.folder], Path(options.html)),)
    if request.texts is None and any("speculation" in side.passes for side in request.sides):
        notes += (f"speculation: {NO_DRAFTS}",)
    return messages.Output(result=result, render=render, notes=notes)


def _request(options: BenchOptions, lines: ProgressLines) -> BenchRequest:
    from moe_optimizer.measure.bench.request import BenchRequest
    from moe_optimizer.measure.bench.result import Limits
    from moe_optimizer.measure.bench.side import STOCK
    from moe_optimizer.measure.claimed_folder import is_claimed

    workload, trace = traffic_of(options)
    folder = run_folder(options.run_dir, "bench", resume=options.resume)
    names = [first_name(options), *([] if options.against == "" else [options.against or STOCK])]
    request = BenchRequest(
        command=("moe-optimizer", *sys.argv[1:]),
        sides=(),
        workload_name=options.workload,
        workload=workload,
        trace=trace,
        repetitions=options.repetitions or _DEFAULT_REPETITIONS,
        limits=Limits(ttft_ms=options.ttft, tpot_ms=options.tpot),
        folder=folder,
        tokenizer=options.tokenizer or options.model_name,
        trust_remote_code=options.trust_remote_code,
        ready_timeout_s=options.ready_timeout or DEFAULT_READY_TIMEOUT_S,
    )
    begun = is_claimed(folder, command="bench")
    sides = sides_of(options, names, run_dir=folder, lines=lines, fits=request.check_fits, measure=not begun)
    # A server that runs already may have been sent the first prompts by an earlier benchmark, and have cached them.
    asked_before = _set_of_prompts(folder) if any(side.url for side in sides) else 0
    return dataclasses.replace(request, sides=sides, asked_before=asked_before)


def _set_of_prompts(folder: Path) -> int:
    """Return which prompts a benchmark sends: others than those of other folders, and the same where it goes on."""
    from moe_optimizer.files import read_text, write_atomically
    from moe_optimizer.measure.claimed_folder import make_run_folder
    from moe_optimizer.plan.serve_args import read_integer

    path = folder / "bench.prompts"
    if not path.exists():
        make_run_folder(folder)
        write_atomically(path, f"{1 + secrets.randbelow(_BENCHMARKS_APART)}\n")
    return read_integer(read_text(path, max_bytes=_NUMBER_BYTES), flag=str(path))


def traffic_of(options: TrafficOptions) -> tuple[Workload | None, tuple[TraceRequest, ...]]:
    """Return the workload of the options, or the requests of their trace.

    Raises:
        InputError: there is no such workload, or options contradict each other.
    """
    from moe_optimizer.measure.bench.texts import texts_of
    from moe_optimizer.measure.bench.trace import read_trace
    from moe_optimizer.measure.bench.workload import load_workload

    workload, trace = None, ()
    if options.workload.endswith(".jsonl"):
        if options.clients or options.rates or options.requests_per_client:
            raise InputError("--clients, --rates and --requests-per-client: a trace has arrivals of its own")
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
            if workload.rates:
                raise InputError("--requests-per-client: an open loop has rates, expected --clients or no such option")
            workload = workload.model_copy(update={"requests_per_client": options.requests_per_client})
        texts_of(workload.prompts)  # a file that is none is refused before anything is measured
    return workload, trace
