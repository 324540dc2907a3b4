"""Runs a benchmark: starts both servers, or one after the other, and sends them the same requests in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from moe_optimizer import __version__
from moe_optimizer.errors import MoeOptimizerError, ServerFailedError
from moe_optimizer.files import write_atomically
from moe_optimizer.inspection.front_end import keep_front_end
from moe_optimizer.measure.bench.pace import Pace
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.result import RESULT_FILE, BenchResult, SideResult, load_result, verdicts, warm_up
from moe_optimizer.measure.bench.samples import RoundSamples, check_samples, read_samples
from moe_optimizer.measure.bench.schedule import Start, Turn, starts
from moe_optimizer.measure.bench.side import RunningSide, Side, StartFacts, Starting, read_start, start_path, starting
from moe_optimizer.measure.bench.trace import Load, write_trace
from moe_optimizer.measure.bench.vllm_load import LoadRequest, Round
from moe_optimizer.measure.process import run_measurement
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.plan.plan import Plan

_LOADER = "moe_optimizer.measure.bench.vllm_load"
_GRACE_S = 5.0
_ATTEMPTS = 8
"""Chosen: at a round. What the first needed is in the caches for the second, but vLLM's gpt-oss kernels, which nothing
warmed up, compiled in three in a row on an H100: other token counts take other variants."""

OnStep = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """How servers are started and stopped."""

    start: Starting
    """As `starting`."""
    at_once: bool = False
    """Servers that run side by side start at the same time, which takes hardly longer than one does; each is ready
    later than it would be alone."""
    stays: bool = False
    """`start` keeps them up when the block ends."""
    stopping: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Makes the block in which servers are stopped that have answered everything."""


def run_bench(request: BenchRequest, *, on_step: OnStep) -> BenchResult:
    """Measure all sides under all loads. What a stopped run has measured in the same folder is kept.

    Args:
        request: what to measure.
        on_step: takes the share of the time of this call that is over, and what comes next.

    Raises:
        InputError: the folder has other samples, or a server takes no requests as long as the workload's.
        RequiredNotAppliedError: an optimization of a plan did not run.
        ServerFailedError: a server died, or a request failed: there is no result then.
    """
    sides = measure_sides(request, on_step=on_step)
    result = BenchResult(
        command=request.command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=request.workload_name,
        description=request.description,
        repetitions=request.repetitions,
        together=request.side_by_side,
        sides=tuple(side.result() for side in sides),
        verdicts=tuple(verdicts(sides[0].rounds, sides[1].rounds)) if len(sides) > 1 else (),
        environment=_environment(request),
    )
    write_atomically(request.folder / RESULT_FILE, json.dumps(encode(result), indent=1) + "\n")
    for side, measured in zip(request.sides, result.sides, strict=True):
        _keep_front_end(side, measured)
    return result


def _keep_front_end(side: Side, result: SideResult) -> None:
    """Keep what API servers took for a token, for later plans of the GPUs of this machine."""
    plan = side.plan
    if plan is None or not plan.num_gpus or plan.engine != "vllm" or plan.vllm_version is None:
        return
    if plan.decision("disaggregation").status is Status.ON:  # a request passes two API servers, which have unlike parts
        return
    found = f"`bench`, {datetime.now(UTC):%Y-%m-%d}"
    times = [(each, each.front_end_time(found)) for each in result.loads]
    with contextlib.suppress(OSError):  # a cache that cannot be written costs no result
        keep_front_end(
            [time for load, time in times if time is not None and load.front_end_saturated],
            [time for load, time in times if time is not None and not load.front_end_saturated],
            vllm=plan.vllm_version,
        )


def measure_sides(request: BenchRequest, *, on_step: OnStep, handling: Handling | None = None) -> list[MeasuredSide]:
    """Measure all sides under all loads, and return the samples of each.

    Args:
        request, on_step: as of `run_bench`.
        handling: of the servers; by default each is started alone.

    Raises: as `run_bench`.
    """
    request.claim_folder()
    handling = handling or Handling(start=starting)
    plan = starts(request.loads, request.repetitions, len(request.sides), side_by_side=request.side_by_side)
    todo = [start for start in plan if not _is_measured(request, start)]
    for start in todo:
        _forget_halves(request, start)
    one_of_each = {_kind(turn): turn for start in todo for turn in start.turns}
    pace = Pace(
        (kind for start in todo for kind in (Pace.START, *_kinds(_missing(request, start.turns)))),
        work={kind: _work(request, turn) for kind, turn in one_of_each.items()},
    )
    for start in todo:
        _measure(request, start, pace, on_step, handling)
    return [MeasuredSide(request, index, plan) for index in range(len(request.sides))]


def _is_measured(request: BenchRequest, start: Start) -> bool:
    files = [request.samples_path(turn) for turn in start.turns]
    return all(path.exists() for path in (*files, *(start_path(request.folder, key) for key in start.keys)))


def _forget_halves(request: BenchRequest, start: Start) -> None:
    """Forget what a stopped run measured of servers that are started again and would not count beside what comes.

    It was another process that was warmed up, and a pair of rounds is compared because both were measured at one time.
    A server that is named by its URL still is the one that it was, and has the prompts in its cache.
    """
    if any(request.sides[side].url for side in start.sides):
        return
    halves = {(turn.load, turn.repetition) for turn in _missing(request, start.turns) if turn.counted}
    for turn in start.turns:
        if not turn.counted or (turn.load, turn.repetition) in halves:
            request.samples_path(turn).unlink(missing_ok=True)


def _missing(request: BenchRequest, turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if not request.samples_path(turn).exists()]


def _kinds(turns: Sequence[Turn]) -> list[str]:
    return list(map(_kind, turns))


def _kind(turn: Turn) -> str:
    return f"{turn.load}{'' if turn.counted else ', warm-up'}"


def _work(request: BenchRequest, turn: Turn) -> float:
    """Return how long a round is beside others: requests of one client after the other, or seconds of arrivals."""
    requests = request.requests(turn)
    return len(requests) / turn.load.clients if turn.load.clients else 1.0 + requests[-1].timestamp


def _measure(request: BenchRequest, start: Start, pace: Pace, on_step: OnStep, handling: Handling) -> None:
    """Start the servers of a part of the run, send them its rounds, check what they gave, and stop them."""
    names = " and ".join(request.sides[side].name for side in start.sides)
    on_step(pace.begin(Pace.START), f"starting {names}")
    with contextlib.ExitStack() as stops, contextlib.ExitStack() as stack:
        # One is ready before the next starts, unless all of them start here.
        begun = ((side, stack.enter_context(_starting(request, side, key, handling))) for side, key in start.keyed)
        up = {side: _ready(request, side, wait) for side, wait in (tuple(begun) if handling.at_once else begun)}
        for side in reversed(start.sides):
            stack.callback(up[side].ask_to_stop)
        _send(request, start.turns, up, pace, on_step)
        for side in start.sides:
            up[side].check_alive(request.sides[side].name)
        facts = {key: up[side].facts() for side, key in start.keyed}
        stops.enter_context(handling.stopping())
        ended = time.monotonic()
    stop_s = None if handling.stays else time.monotonic() - ended
    for key, each in facts.items():
        write_atomically(start_path(request.folder, key), dataclasses.replace(each, stop_s=stop_s).to_json())


def _starting(
    request: BenchRequest, side: int, key: str, handling: Handling
) -> AbstractContextManager[Callable[[], RunningSide]]:
    run_dir = request.folder / key
    return handling.start(request.sides[side], run_dir=run_dir, ready_timeout_s=request.ready_timeout_s)


def _ready(request: BenchRequest, side: int, wait: Callable[[], RunningSide]) -> RunningSide:
    server, name = wait(), request.sides[side].name
    request.check_fits(name, server.max_model_len)
    server.check_alive(name)
    return server


def _send(
    request: BenchRequest, turns: Sequence[Turn], up: Mapping[int, RunningSide], pace: Pace, on_step: OnStep
) -> None:
    """Send rounds to servers that are up, those again in which something compiled.

    Raises:
        ServerFailedError: a request failed, or something compiled in every attempt at a round.
    """
    spoiled: list[Turn] = []
    for _ in range(_ATTEMPTS):
        kinds = _kinds(_missing(request, turns))

        def show(share: float, text: str, kinds: Sequence[str] = kinds) -> None:
            on_step(pace.begin(kinds[round(share * len(kinds))]), text)

        _send_missing(request, turns, up, show)
        pace.end()
        spoiled = [turn for turn in turns if turn.counted and read_samples(request.samples_path(turn)).compilations]
        if not spoiled:
            return
        # Both sides of a pair go again: they are compared because they were measured within a minute.
        rounds = {(turn.load, turn.repetition) for turn in spoiled}
        for turn in turns:
            if turn.counted and (turn.load, turn.repetition) in rounds:
                request.discard(turn)
    raise ServerFailedError(
        f"{request.sides[spoiled[0].side].name}, {spoiled[0].load}: kernels were compiled in each of {_ATTEMPTS} "
        "attempts at a round",
        hint="go on with the same --run-dir once they are in the caches, and nothing else compiles on this machine",
    )


def _send_missing(request: BenchRequest, turns: Sequence[Turn], up: Mapping[int, RunningSide], on_step: OnStep) -> None:
    """Send the rounds that have no samples; one that must not count leaves none."""
    run_measurement(
        _LOADER,
        LoadRequest(
            tokenizer=request.tokenizer,
            trust_remote_code=request.trust_remote_code,
            texts=request.texts,
            rounds=tuple(_round(request, turn, up[turn.side]) for turn in turns),
        ),
        on_step=on_step,
        log=request.folder / "load.log",
        # Prompts are drawn from hashes of strings there.
        environment={**os.environ, "PYTHONHASHSEED": "0"},
        grace_s=_GRACE_S,
    )
    for turn in turns:
        path = request.samples_path(turn)
        try:
            title = f"{request.sides[turn.side].name}, {turn.load}"
            check_samples(read_samples(path), request.requests(turn), title=title)
        except MoeOptimizerError:
            path.unlink()
            raise


def _round(request: BenchRequest, turn: Turn, server: RunningSide) -> Round:
    requests = request.requests(turn)
    trace = request.samples_path(turn).with_suffix(".jsonl")
    write_trace(requests, trace)
    return Round(
        base_url=server.base_url,
        model=server.model,
        trace=str(trace),
        requests=len(requests),
        clients=turn.load.clients,
        run_dirs=tuple(map(str, server.run_dirs)),
        caches=server.caches,
        samples=str(request.samples_path(turn)),
        servers=server.pids,
        title=f"{request.sides[turn.side].name}: {_kind(turn)}",
    )


class MeasuredSide:
    """What the files of a benchmark say of one side."""

    def __init__(self, request: BenchRequest, index: int, plan: Sequence[Start]) -> None:
        self._request = request
        self._side = request.sides[index]
        self._starts: list[StartFacts] = []
        self._warm_up: list[RoundSamples] = []
        self.rounds: dict[Load, list[RoundSamples]] = {}
        self._discarded: Counter[Load] = Counter()
        for start in plan:
            keys = dict(start.keyed)
            if index in keys:
                self._starts.append(read_start(start_path(request.folder, keys[index])))
            for turn in start.turns:
                if turn.side == index:
                    self._discarded[turn.load] += len(request.discarded(turn))
                    kept = self.rounds.setdefault(turn.load, []) if turn.counted else self._warm_up
                    kept.append(read_samples(request.samples_path(turn)))

    def result(self) -> SideResult:
        """Return what the benchmark says of this side."""
        compilations = [each.compilations for each in self._starts if each.compilations is not None]
        compiled = [said for each in self._starts for said in each.compiled]
        return SideResult(
            name=self._side.name,
            most_api_servers=self._side.most_api_servers,
            plan_digest=self._side.plan.digest if self._side.plan is not None else None,
            passes=self._side.passes,
            expected=self._side.expected,
            ready_s=tuple(each.ready_s for each in self._starts if each.ready_s is not None),
            warm=warm_up(self._warm_up, sum(compilations) if compilations else None, compiled),
            memory=self._starts[-1].memory,
            loads=tuple(
                load_result(load, rounds, self._request.limits, discarded=self._discarded[load])
                for load, rounds in self.rounds.items()
            ),
        )


def _environment(request: BenchRequest) -> dict[str, str]:
    plans = [side.plan for side in request.sides if side.plan is not None]
    return {**environment_of(plans[0] if plans else None), "model": request.tokenizer}


def environment_of(plan: Plan | None) -> dict[str, str]:
    """Return on what a plan is measured: versions, and the device; without a plan only what is ours."""
    about = {"moe-optimizer": __version__, "python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        about["torch"] = metadata.version("torch")
    if plan is None:
        return about
    hardware = plan.hardware
    device = hardware.gpu.name if hardware.gpu and plan.num_gpus else hardware.cpu.name if hardware.cpu else "CPU"
    about |= {"vllm": str(plan.vllm_version), "device": device, "gpus": str(plan.num_gpus)}
    if plan.num_gpus:
        return about | {"driver": hardware.driver_version or "unknown"}
    return about | ({"cores": str(hardware.cpu.cores)} if hardware.cpu else {})
