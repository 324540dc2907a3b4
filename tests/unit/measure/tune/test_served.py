"""How much of a budget a measurement may take."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.launcher.deployment import STOP_MARGIN_S
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.result import Limits, MemoryUse
from moe_optimizer.measure.bench.run import Handling, OnStep
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.side import RunningSide, Side, StartFacts, start_path
from moe_optimizer.measure.tune import served, server_pool
from moe_optimizer.measure.tune.goal import parse_goal
from moe_optimizer.measure.tune.journal import Journal
from moe_optimizer.measure.tune.served import Judge, ServedMeasure
from moe_optimizer.measure.tune.trial import STOCK, Candidate, Outcome
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.hardware import HardwareSpec
from tests.builders.machines import cpu_machine, gpus
from tests.builders.models import qwen3_30b_a3b, tiny_moe
from tests.builders.plans import request

ROUND = RoundSamples(
    duration_s=1.0, ttft_s=(0.5,), e2e_s=(1.0,), itl_s=(0.5,), input_tokens=(1,), output_tokens=(2,), errors=("",),
    energy_j=None,
)  # fmt: skip


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each timer that was set."""
    found: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _which, seconds: found.append(seconds))
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    monkeypatch.setattr(server_pool, "starting", paper_start)
    return found


@contextlib.contextmanager
def paper_start(side: Side, **_: Any) -> Iterator[Callable[[], RunningSide]]:
    yield lambda: RunningSide(base_url=f"http://{side.name}", model="x", max_model_len=1, ready_s=1.0, info=None)


def right(ours: Side, theirs: Side, folder: Path) -> Outcome:
    return Outcome()


def served_by(
    folder: Path,
    *,
    budget_s: float,
    judge: Judge = right,
    machine: HardwareSpec | None = None,
    share: str = "0.9",
) -> ServedMeasure:
    template = BenchRequest(
        command=(), sides=(), workload_name="x", workload=None, repetitions=2, limits=Limits(),
        folder=folder, tokenizer="x", trust_remote_code=False, ready_timeout_s=1,
    )  # fmt: skip

    def nobody(candidate: Candidate, number: int) -> Side:
        # Another plan for stock vLLM, so that it is another server.
        arguments = ("--gpu-memory-utilization", share) if machine and machine.gpu else ()
        batch_size = 8 if candidate.stock else 16
        plan = make_plan(request(tiny_moe(), machine or cpu_machine(), batch_size=batch_size, vllm_args=arguments))
        return Side(name="stock" if candidate.stock else "the plan", plan=plan)

    return ServedMeasure(
        side_of=nobody, template=template, goal=parse_goal("latency"), judge=judge,
        journal=Journal(None, budget_s=budget_s), on_step=lambda share, text: None, top_logprobs=20,
    )  # fmt: skip


def judged(folder: Path, *, budget_s: float) -> None:
    assert not served_by(folder, budget_s=budget_s).judged(Candidate()).failed


@pytest.mark.parametrize(("enabled", "changes"), [([], False), (["norm-rope-fusion"], True)])
def test_a_plan_with_which_vllm_computes_otherwise_changes_answers(
    enabled: list[str], changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = served_by(tmp_path, budget_s=1.0)
    wishes = resolve_wishes(enabled, ["flash-dmoe"])
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 1), wishes=wishes))
    monkeypatch.setattr(measure, "plan", lambda _candidate: plan)
    assert measure.changes_answers(Candidate()) is changes


@pytest.mark.parametrize(("budget_s", "kept_s"), [(1200.0, 2 * STOP_MARGIN_S), (100.0, 10.0)])
def test_before_any_server_has_stopped_there_is_time_to_kill_two(
    budget_s: float, kept_s: float, limits: list[float], tmp_path: Path
) -> None:
    judged(tmp_path, budget_s=budget_s)
    assert limits[0] == budget_s - kept_s


def test_a_stop_after_the_last_round_is_not_cut_off(
    limits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(request: BenchRequest, *, on_step: OnStep, handling: Handling) -> list[Any]:
        on_step(0.0, "starting")
        with handling.stopping():
            limits.append(-1.0)
        on_step(0.5, "starting again")
        with handling.stopping():
            limits.append(-1.0)
        raise ServerFailedError("what comes of it is of no matter here")

    monkeypatch.setattr(served, "measure_sides", measured)
    assert served_by(tmp_path, budget_s=100.0).paired(Candidate(), STOCK).failed
    # Armed, off while servers stop, armed for the next start, off to the end.
    assert limits == [90.0, 0, -1.0, 90.0, 0, -1.0, 0]


def test_servers_have_the_time_to_stop_that_the_slowest_took(limits: list[float], tmp_path: Path) -> None:
    for number, stop_s in enumerate([3.0, 7.0, None]):
        facts = StartFacts(ready_s=1.0, memory=MemoryUse(gpu_bytes=None, process_bytes=None), compilations=None)
        path = start_path(tmp_path / f"paired-{number}", "server-0")
        path.parent.mkdir()
        path.write_text(dataclasses.replace(facts, stop_s=stop_s).to_json(), encoding="utf-8")
    judged(tmp_path, budget_s=1200.0)
    assert limits[0] == 1193.0


def test_a_pair_that_was_measured_is_judged_where_it_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[float]
) -> None:
    started: list[str] = []
    seen: list[str | None] = []

    @contextlib.contextmanager
    def starting(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        started.append(side.name)
        with paper_start(side, **how) as wait:
            yield lambda: dataclasses.replace(wait(), ask_to_stop=lambda: None)

    def measured(request: BenchRequest, *, on_step: OnStep, handling: Handling) -> list[Any]:
        with contextlib.ExitStack() as stack:
            how: Any = {"run_dir": tmp_path, "ready_timeout_s": 1.0}
            for wait in [stack.enter_context(handling.start(side, **how)) for side in request.sides]:
                wait()
        raise ServerFailedError("what comes of it is of no matter here")

    def judge(ours: Side, theirs: Side, folder: Path) -> Outcome:
        seen.extend([ours.url, theirs.url])
        return Outcome()

    monkeypatch.setattr(served, "measure_sides", measured)
    monkeypatch.setattr(server_pool, "starting", starting)
    monkeypatch.setattr(server_pool, "_is_alive", lambda *_: True)
    measure = served_by(tmp_path, budget_s=100.0, judge=judge)
    measure.paired(Candidate(), STOCK)
    measure.judged(Candidate())
    assert started == ["the plan", "stock"]
    assert seen == ["http://the plan", "http://stock"]


@pytest.mark.parametrize(("machine", "at_once"), [(cpu_machine(), True), (gpus("h100_sxm"), False)])
def test_on_a_gpu_one_server_is_ready_before_the_next_starts(
    machine: HardwareSpec, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[float]
) -> None:
    seen: list[bool] = []

    def measured(request: BenchRequest, *, on_step: OnStep, handling: Handling) -> list[Any]:
        seen.append(handling.at_once)
        raise ServerFailedError("what comes of it is of no matter here")

    monkeypatch.setattr(served, "measure_sides", measured)
    served_by(tmp_path, budget_s=100.0, machine=machine).paired(Candidate(), STOCK)
    assert seen == [at_once]


@pytest.mark.parametrize(("machine", "once_s"), [(cpu_machine(), 0.0), (gpus("h200"), 50.0)])
def test_of_servers_that_start_one_after_the_other_only_the_slowest_is_to_be_expected_again(
    machine: HardwareSpec, once_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[float]
) -> None:
    @contextlib.contextmanager
    def starting(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        with paper_start(side, **how) as wait:
            yield lambda: dataclasses.replace(wait(), ready_s=50.0 if side.name == "stock" else 60.0)

    def measured(request: BenchRequest, *, on_step: OnStep, handling: Handling) -> list[Any]:
        how: Any = {"run_dir": tmp_path, "ready_timeout_s": 1.0}
        with contextlib.ExitStack() as stack:
            for wait in [stack.enter_context(handling.start(side, **how)) for side in request.sides]:
                wait()
        side: Any = types.SimpleNamespace(rounds={load: [ROUND] * 2 for load in request.loads})
        return [side, side]

    monkeypatch.setattr(served, "measure_sides", measured)
    monkeypatch.setattr(server_pool, "starting", starting)
    monkeypatch.setattr(server_pool, "_is_alive", lambda *_: True)
    measure = served_by(tmp_path, budget_s=100.0, machine=machine, share="0.4")
    assert [measure.paired(Candidate(), STOCK).once_s for _ in range(2)] == [once_s, 0.0]
