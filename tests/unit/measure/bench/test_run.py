"""Whole benchmarks between servers that are stand-ins, as is what sends them requests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli.progress import ProgressLines, progress_bar
from moe_optimizer.errors import RequiredNotAppliedError, ServerFailedError
from moe_optimizer.inspection.front_end import read_front_end
from moe_optimizer.launcher import deployment
from moe_optimizer.measure.bench import run, side
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.result import RESULT_FILE, BenchResult, Limits
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.side import RunningSide, Side, ask, read_start, start_path
from moe_optimizer.measure.bench.table import render
from moe_optimizer.measure.bench.trace import TraceRequest, read_trace
from moe_optimizer.measure.bench.vllm_load import LoadRequest, Round
from moe_optimizer.measure.bench.workload import RequestKind, TokenRange, Workload
from moe_optimizer.passes.registry import required_key, resolve_wishes
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.plan.plan import Plan
from tests.builders import cpu_machine, gpus, made_plan, tiny_moe
from tests.free_ports import free_port
from tests.unit.measure.paper_server import paper_server

FAKE = Path(__file__).resolve().parents[3] / "unit" / "launcher" / "fake_server.py"
WORKLOAD = Workload(
    description="a test", clients=(2,), requests_per_client=1,
    requests=(RequestKind(prompt=TokenRange(least=20, most=60), output=TokenRange(least=3, most=9)),),
)  # fmt: skip


class Sender:
    """Stands in for vLLM's load generator: the second server is half as fast."""

    def __init__(self) -> None:
        self.compiles: Callable[[str], int] = lambda title: 0
        """Title of a round -> kernels that are compiled meanwhile."""
        self.sent: dict[str, list[tuple[TraceRequest, ...]]] = {}
        """Title of a round -> what was sent, each time."""
        self.after: Callable[[], None] = lambda: None

    def run(self, module: str, asked: LoadRequest, **how: Any) -> int:
        for each in asked.rounds:
            if not Path(each.samples).exists():
                Path(each.samples).write_text(json.dumps(encode(self.samples(each))))
        self.after()
        return 0

    def samples(self, each: Round) -> RoundSamples:
        requests = read_trace(Path(each.trace))
        before = self.sent.setdefault(each.title, [])
        before.append(requests)
        # No two rounds are alike.
        tpot = (0.02 if each.title.startswith("theirs") else 0.01) * (1 + 0.001 * len(self.sent))
        tokens = tuple(each.output_length for each in requests)
        return RoundSamples(
            duration_s=tpot * sum(tokens),
            ttft_s=(0.1,) * len(tokens),
            e2e_s=tuple(0.1 + tpot * (count - 1) for count in tokens),
            itl_s=(tpot,) * (sum(tokens) - len(tokens)),
            input_tokens=tuple(each.input_length for each in requests),
            output_tokens=tokens,
            errors=("",) * len(tokens),
            energy_j=None,
            compilations=self.compiles(f"{each.title}, {len(before)}"),
        )


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    made = Sender()
    monkeypatch.setattr(run, "run_measurement", made.run)
    return made


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[BenchRequest]:
    with paper_server() as ours, paper_server() as theirs:
        named = (("ours", ours), ("theirs", theirs))
        yield BenchRequest(
            command=("bench",),
            sides=tuple(Side(name=name, plan=None, url=each.base_url) for name, each in named),
            workload_name="a test", workload=WORKLOAD, repetitions=3, limits=Limits(), folder=tmp_path / "run",
            tokenizer="paper", trust_remote_code=False, ready_timeout_s=60.0,
        )  # fmt: skip


def bench(asked: BenchRequest) -> BenchResult:
    return run.run_bench(asked, on_step=lambda share, text: None)


def test_where_nothing_compiles_every_round_counts(sender: Sender, asked: BenchRequest) -> None:
    result = bench(asked)
    assert [[load.discarded for load in side.loads] for side in result.sides] == [[0], [0]]
    assert {each.metric: each.verdict for each in result.verdicts}["tpot_ms"] == "faster"


def bench_beside_busy_api_servers(
    plan: Plan, busy: float, sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> BenchResult:
    """Bench a plan whose API server is busy for a share of a core."""
    urls = {each.name: str(each.url) for each in asked.sides}

    @contextlib.contextmanager
    def starting(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        yield lambda: ask(urls[side.name])

    monkeypatch.setattr(run, "starting", starting)
    plain = sender.samples

    def of_api_servers(each: Round) -> RoundSamples:
        samples = plain(each)
        return dataclasses.replace(samples, api_servers_s=((busy * samples.duration_s,),))

    monkeypatch.setattr(sender, "samples", of_api_servers)
    return bench(dataclasses.replace(asked, sides=(Side(name="ours", plan=plan),)))


ON_A_GPU = made_plan(tiny_moe(), gpus("h100_sxm", 1))
APART = made_plan(tiny_moe(), gpus("h100_sxm", 2), wishes=resolve_wishes(["disaggregation"], []))


@pytest.mark.parametrize(
    ("plan", "busy", "known"),
    [
        (ON_A_GPU, 0.85, True),
        (ON_A_GPU, 0.75, False),
        (APART, 0.95, False),
        (made_plan(tiny_moe(), cpu_machine()), 0.95, False),
    ],
    ids=["saturated", "not saturated", "prefill and decode apart", "on a CPU"],
)
def test_what_a_saturated_api_server_takes_for_a_token_is_kept_for_plans_of_gpus(
    plan: Plan, busy: float, known: bool, sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(asked.folder.parent / "cache"))
    bench_beside_busy_api_servers(plan, busy, sender, asked, monkeypatch)
    # Two clients, some 10 ms between the tokens of each.
    times = read_front_end(str(plan.vllm_version)).times
    assert [(each.clients, round(each.us_per_token, -2)) for each in times] == [(2, 5000)] * known


def test_a_cache_that_cannot_be_written_costs_no_result(
    sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = asked.folder.parent / "cache"
    no_folder.write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    result = bench_beside_busy_api_servers(ON_A_GPU, 0.85, sender, asked, monkeypatch)
    assert [load.front_end_saturated for load in result.sides[0].loads] == [True]


@pytest.mark.parametrize("ends", ["well", "early"])
def test_servers_beside_each_other_stop_at_the_same_time(
    ends: str, sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def starting(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        found = ask(str(side.url))
        try:
            yield lambda: dataclasses.replace(found, ask_to_stop=lambda: seen.append(f"{side.name} is asked"))
        finally:
            seen.append(f"{side.name} has stopped")

    monkeypatch.setattr(run, "starting", starting)
    if ends == "early":
        sender.after = lambda: sys.exit(1)
    with contextlib.suppress(SystemExit):
        bench(asked)
    assert seen == ["ours is asked", "theirs is asked", "theirs has stopped", "ours has stopped"]


@pytest.mark.parametrize(
    ("at_once", "order"),
    [
        (False, ["ours starts", "ours is ready", "theirs starts", "theirs is ready"]),
        (True, ["ours starts", "theirs starts", "ours is ready", "theirs is ready"]),
    ],
)
def test_servers_start_at_the_same_time_only_where_nobody_asks_how_long_one_takes(
    at_once: bool, order: list[str], sender: Sender, asked: BenchRequest
) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def starting(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        def wait() -> RunningSide:
            seen.append(f"{side.name} is ready")
            return ask(str(side.url))

        seen.append(f"{side.name} starts")
        yield wait

    handling = run.Handling(start=starting, at_once=at_once)
    run.measure_sides(asked, on_step=lambda share, text: None, handling=handling)
    assert seen == order


def test_how_long_the_servers_took_to_stop_is_kept(
    sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    @contextlib.contextmanager
    def slow_to_stop(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        yield lambda: ask(str(side.url))
        now[0] += 4.0

    monkeypatch.setattr(run, "starting", slow_to_stop)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bench(asked)
    assert [read_start(start_path(asked.folder, f"server-{side}")).stop_s for side in range(2)] == [8.0, 8.0]


def test_a_round_in_which_something_compiled_is_sent_again_to_both_sides(sender: Sender, asked: BenchRequest) -> None:
    # The third round of the second server, the first time.
    sender.compiles = lambda title: int(title == "theirs: 2 clients, 3")
    result = bench(asked)
    for served in result.sides:
        (load,) = served.loads
        assert (load.rounds, load.discarded, load.completed) == (3, 1, 6)
        sent = sender.sent[f"{served.name}: 2 clients"]
        assert len(sent) == 4
        lengths = [[(each.input_length, each.output_length) for each in requests] for requests in sent]
        # As many tokens as before, of other prompts: those are in the prefix cache.
        assert lengths[3] == lengths[2]
        assert not {each.hash_ids for each in sent[3]} & {each.hash_ids for each in sent[2]}
    assert "1 round thrown away" in render(result)


def test_a_server_that_compiles_in_every_attempt_has_no_result(sender: Sender, asked: BenchRequest) -> None:
    sender.compiles = lambda title: int(title.startswith("theirs: 2 clients"))
    with pytest.raises(ServerFailedError, match="theirs, 2 clients"):
        bench(asked)
    assert not (asked.folder / RESULT_FILE).exists()


def test_compiling_in_the_warm_up_spoils_nothing(sender: Sender, asked: BenchRequest) -> None:
    sender.compiles = lambda title: int("warm-up" in title)
    assert bench(asked).sides[0].loads[0].discarded == 0


@pytest.mark.parametrize(("started", "sent"), [(True, (2, 4, 4)), (False, (1, 3, 4))])
def test_a_run_that_goes_on_warms_up_what_it_starts_and_measures_its_pairs_whole(
    started: bool, sent: tuple[int, int, int], sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    if started:
        asked = _with_servers_of_its_own(asked, monkeypatch)
    sender.after = stop
    with pytest.raises(KeyboardInterrupt):
        bench(asked)
    sender.after = lambda: None
    (asked.folder / "side-1_2-clients_2.json").unlink()
    bench(asked)
    warm_ups, ours, theirs = sent
    assert {title: len(rounds) for title, rounds in sender.sent.items()} == {
        "ours: 2 clients, warm-up": warm_ups, "theirs: 2 clients, warm-up": warm_ups,
        "ours: 2 clients": ours, "theirs: 2 clients": theirs,
    }  # fmt: skip


def _with_servers_of_its_own(asked: BenchRequest, monkeypatch: pytest.MonkeyPatch) -> BenchRequest:
    """Return the same request to servers that it starts by plans: stand-ins at the URLs."""
    plan = made_plan(tiny_moe(), cpu_machine())
    urls = {side.name: side.url for side in asked.sides}

    @contextlib.contextmanager
    def starting(side: Side, **how: Any) -> Iterator[Callable[[], RunningSide]]:
        yield lambda: ask(str(urls[side.name]))

    monkeypatch.setattr(run, "starting", starting)
    return dataclasses.replace(asked, sides=tuple(Side(name=side.name, plan=plan) for side in asked.sides))


def test_a_server_that_is_gone_at_the_end_has_no_result(sender: Sender, asked: BenchRequest) -> None:
    with paper_server() as third:
        gone = dataclasses.replace(asked, sides=(asked.sides[0], Side(name="gone", plan=None, url=third.base_url)))
        sender.after = third.stop
        with pytest.raises(ServerFailedError, match="gone"):
            bench(gone)
    assert not (asked.folder / RESULT_FILE).exists()


def test_a_server_that_does_not_run_by_its_plan_has_no_result(
    sender: Sender, asked: BenchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, str(FAKE)]
    monkeypatch.setattr(
        deployment, "server_command", lambda plan, arguments: [*command, arguments.value("--port"), "refuse"]
    )
    wishes = resolve_wishes(("flash-dmoe",), ("expert-load",))
    plan = made_plan(tiny_moe(), cpu_machine(), port=free_port(), wishes=wishes)
    with pytest.raises(RequiredNotAppliedError, match="cheese"):
        bench(dataclasses.replace(asked, sides=(Side(name="ours", plan=plan),)))
    assert sender.sent == {}
    assert not (asked.folder / RESULT_FILE).exists()


@pytest.mark.parametrize("required", [False, True])
def test_a_pass_that_workers_timed_no_faster_may_stay_away_unless_it_is_required(
    required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, str(FAKE)]
    monkeypatch.setattr(
        deployment, "server_command", lambda plan, arguments: [*command, arguments.value("--port"), "refuse", "slower"]
    )
    names = ("flash-dmoe",) if required else ()
    wishes = resolve_wishes(("flash-dmoe",), ("expert-load",))
    plan = made_plan(
        tiny_moe(), cpu_machine(), port=free_port(), wishes=wishes, required=frozenset(map(required_key, names))
    )
    with side.starting(Side(name="ours", plan=plan), run_dir=tmp_path, ready_timeout_s=60.0) as wait:
        if required:
            with pytest.raises(RequiredNotAppliedError, match="cheese"):
                wait()
            return
        wait()
    assert "ours runs without flash_dmoe: fallback: cheese" in caplog.text


def test_the_time_left_does_not_take_a_long_start_for_the_pace_of_short_rounds(
    monkeypatch: pytest.MonkeyPatch, asked: BenchRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start of 100 s, then eight rounds of 3 s."""
    now = [0.0]
    sender = Sender()

    def send(module: str, load: LoadRequest, *, on_step: Callable[[float, str], None], **how: Any) -> int:
        now[0] += 100.0
        for number, each in enumerate(load.rounds):
            on_step(number / len(load.rounds), each.title)
            now[0] += 3.0
        return sender.run(module, load)

    monkeypatch.setattr(run, "run_measurement", send)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with progress_bar("bench", lines=ProgressLines(verbose=True)) as show:
        run.run_bench(asked, on_step=show)
    left = re.findall(r"about (\d+) min left", capsys.readouterr().err)
    assert left == ["1"] * 7
