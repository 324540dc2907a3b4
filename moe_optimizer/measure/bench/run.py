"""Runs a benchmark: starts both servers, or one after the other, and sends them the same requests in turns."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_optimizer import __version__
from moe_optimizer.errors import InputError
from moe_optimizer.launcher.http_client import ServerClient, api_key
from moe_optimizer.launcher.metrics_page import total
from moe_optimizer.measure.bench.result import (
    BenchResult,
    Limits,
    MemoryUse,
    SideResult,
    load_result,
    verdicts,
    warm_up,
)
from moe_optimizer.measure.bench.samples import RoundSamples, check_samples, read_samples
from moe_optimizer.measure.bench.schedule import Turn, alone, sides_in_turn, together
from moe_optimizer.measure.bench.side import RunningSide, Side, opened
from moe_optimizer.measure.bench.trace import Load, TraceRequest, draw, loads_of, moved, write_trace
from moe_optimizer.measure.bench.vllm_load import LoadRequest, Round
from moe_optimizer.measure.bench.workload import Workload
from moe_optimizer.measure.process import run_measurement

_LOADER = "moe_optimizer.measure.bench.vllm_load"
_GRACE_S = 5.0
_WARM_UP_ROUND = 1_000_000
"""Added to a round's number: requests of the warm-up are not those that count."""
_COMPILATIONS = "moe_optimizer_compilations_after_ready_total"

OnStep = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What to measure."""

    sides: tuple[Side, ...]
    """One or two."""
    workload_name: str
    workload: Workload | None
    trace: tuple[TraceRequest, ...] = ()
    """Replayed as it is, where there is no workload."""
    repetitions: int
    limits: Limits
    folder: Path
    """Gets traces, samples and the run folders; a run that was stopped goes on from what is there."""
    tokenizer: str
    trust_remote_code: bool
    ready_timeout_s: float

    @property
    def loads(self) -> tuple[Load, ...]:
        """The points at which servers are measured."""
        return loads_of(self.workload) if self.workload is not None else (Load(),)

    @property
    def description(self) -> str:
        """What the requests are like."""
        return self.workload.description if self.workload is not None else f"{len(self.trace)} requests of a trace"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion together."""
        if self.workload is not None:
            return self.workload.longest
        return max(each.input_length + each.output_length for each in self.trace)

    def requests(self, turn: Turn) -> tuple[TraceRequest, ...]:
        """Return the requests of one turn: the same for both sides, and others in every repetition."""
        number = turn.repetition + (0 if turn.counted else _WARM_UP_ROUND)
        if self.workload is None:
            return moved(self.trace, number)
        shorter = {"requests_per_client": 1, "seconds": self.workload.seconds / 2}
        workload = self.workload if turn.counted else self.workload.model_copy(update=shorter)
        return draw(workload, turn.load, round_number=number)


@dataclass(slots=True)
class _Found:
    """What was measured of one side so far."""

    ready_s: list[float] = field(default_factory=list)
    memory: MemoryUse = field(default_factory=lambda: MemoryUse(gpu_bytes=None, process_bytes=None))
    compilations: int | None = None
    rounds: dict[Load, list[RoundSamples]] = field(default_factory=dict)
    warm_up: list[RoundSamples] = field(default_factory=list)


def run_bench(request: BenchRequest, *, on_step: OnStep) -> BenchResult:
    """Measure all sides under all loads.

    Raises:
        InputError: a server takes no requests as long as the workload's.
        RequiredNotAppliedError: an optimization of a plan did not run.
        ServerFailedError: a server died, or a request failed: there is no result then.
    """
    request.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = [_Found() for _ in request.sides]
    side_by_side = len(request.sides) == 1 or all(side.plan is None for side in request.sides) or _both_fit(request)
    (_measure_together if side_by_side else _measure_in_turns)(request, found, on_step)
    return BenchResult(
        workload=request.workload_name,
        description=request.description,
        repetitions=request.repetitions,
        together=side_by_side,
        sides=tuple(_side_result(request, side, each) for side, each in zip(request.sides, found, strict=True)),
        verdicts=tuple(verdicts(found[0].rounds, found[1].rounds)) if len(found) > 1 else (),
        environment=_environment(request),
    )


def _measure_together(request: BenchRequest, found: Sequence[_Found], on_step: OnStep) -> None:
    with contextlib.ExitStack() as stack:
        up = {
            index: stack.enter_context(_opened(request, index, f"side-{index}")) for index in range(len(request.sides))
        }
        turns = list(together(request.loads, request.repetitions, len(request.sides)))
        _send(request, turns, up, found, on_step)


def _measure_in_turns(request: BenchRequest, found: Sequence[_Found], on_step: OnStep) -> None:
    parts = request.repetitions * len(request.sides)
    done = 0
    for repetition in range(request.repetitions):
        for index in sides_in_turn(repetition, len(request.sides)):
            on_step(done / parts, f"starting {request.sides[index].name}, {repetition + 1} of {request.repetitions}")
            with _opened(request, index, f"side-{index}_{repetition}") as server:
                turns = list(alone(request.loads, repetition, index))
                _send(request, turns, {index: server}, found, _part(on_step, done, parts))
            done += 1


def _part(on_step: OnStep, done: int, parts: int) -> OnStep:
    return lambda share, text: on_step((done + share) / parts, text)


@contextlib.contextmanager
def _opened(request: BenchRequest, index: int, folder: str) -> Iterator[RunningSide]:
    with opened(
        request.sides[index], run_dir=request.folder / folder, ready_timeout_s=request.ready_timeout_s
    ) as server:
        if server.max_model_len < request.longest:
            raise InputError(
                f"workload {request.workload_name}: requests of up to {request.longest} tokens, but "
                f"{request.sides[index].name} takes at most {server.max_model_len}"
            )
        yield server


def _send(
    request: BenchRequest,
    turns: Iterable[Turn],
    up: Mapping[int, RunningSide],
    found: Sequence[_Found],
    on_step: OnStep,
) -> None:
    """Send the rounds of some turns to servers that are up, and keep what they gave."""
    turns = list(turns)
    for index, server in up.items():
        server.check_alive(request.sides[index].name)
        if server.ready_s is not None:
            found[index].ready_s.append(server.ready_s)
    run_measurement(
        _LOADER,
        LoadRequest(
            tokenizer=request.tokenizer,
            trust_remote_code=request.trust_remote_code,
            rounds=tuple(_round(request, turn, up[turn.side]) for turn in turns),
        ),
        on_step=on_step,
        log=request.folder / "load.log",
        # Prompts are drawn from hashes of strings there.
        environment={**os.environ, "PYTHONHASHSEED": "0"},
        grace_s=_GRACE_S,
    )
    for index, server in up.items():
        server.check_alive(request.sides[index].name)
        found[index].memory = server.memory()
        found[index].compilations = _compilations(server, found[index].compilations)
    for turn in turns:
        samples = read_samples(request.folder / f"{turn.key}.json")
        check_samples(samples, request.requests(turn), title=f"{request.sides[turn.side].name}, {turn.load}")
        if turn.counted:
            found[turn.side].rounds.setdefault(turn.load, []).append(samples)
        else:
            found[turn.side].warm_up.append(samples)


def _round(request: BenchRequest, turn: Turn, server: RunningSide) -> Round:
    requests = request.requests(turn)
    trace = request.folder / f"{turn.key}.jsonl"
    write_trace(requests, trace)
    what = f"{request.sides[turn.side].name}: {turn.load}" + ("" if turn.counted else ", warm-up")
    return Round(
        base_url=server.base_url,
        model=server.model,
        trace=str(trace),
        requests=len(requests),
        clients=turn.load.clients,
        samples=str(request.folder / f"{turn.key}.json"),
        title=what,
    )


def _compilations(server: RunningSide, before: int | None) -> int | None:
    """Add what this start of a server compiled after it was ready; None where it does not count."""
    counted = total(ServerClient(server.base_url, api_key()).metrics(), _COMPILATIONS)
    return before if counted is None else counted + (before or 0)


def _side_result(request: BenchRequest, side: Side, found: _Found) -> SideResult:
    return SideResult(
        name=side.name,
        plan_digest=side.plan.digest if side.plan is not None else None,
        passes=side.passes,
        ready_s=tuple(found.ready_s),
        warm=warm_up(found.warm_up, found.compilations),
        memory=found.memory,
        loads=tuple(load_result(load, rounds, request.limits) for load, rounds in found.rounds.items()),
    )


def _both_fit(request: BenchRequest) -> bool:
    """Return whether two servers have room beside each other. On a GPU vLLM takes what there is."""
    plans = [side.plan for side in request.sides if side.plan is not None]
    if any(plan.num_gpus for plan in plans):
        return False
    needed = sum(
        plan.memory.weight_bytes + plan.memory.activation_bytes + plan.memory.workspace_bytes
        + plan.memory.kv_cache_bytes
        for plan in plans
    )  # fmt: skip
    return all(needed <= plan.memory.total_bytes for plan in plans)


def _environment(request: BenchRequest) -> dict[str, str]:
    plans = [side.plan for side in request.sides if side.plan is not None]
    machine = {"machine": plans[0].hardware.name, "vllm": str(plans[0].vllm_version)} if plans else {}
    return {"moe-optimizer": __version__, "python": platform.python_version(), "model": request.tokenizer, **machine}
