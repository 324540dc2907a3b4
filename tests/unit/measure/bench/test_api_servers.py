"""What API servers took: which processes they are, the arithmetic, and when a user is told."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import setproctitle

from moe_optimizer.measure.bench.api_servers import ApiServers, processor_seconds, seconds_between, use_of
from moe_optimizer.measure.bench.result import LoadResult, SideResult
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.table import render
from moe_optimizer.plan.json_codec import decode, encode
from tests.builders.results import bench_result
from tests.eventually import eventually

SERVER = """
import multiprocessing, sys, time
import setproctitle

def be(title):
    setproctitle.setproctitle(title)
    while time.process_time() < 0.3:
        pass
    time.sleep(600)

for title in sys.argv[1:]:
    multiprocessing.get_context("fork").Process(target=be, args=(title,), daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""
"""Starts processes of these titles, which take 0.3 s of a processor, and is idle itself."""
assert setproctitle, "the stand-in sets titles as vLLM does"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    command = [sys.executable, "-c", SERVER, *request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            for each in [*psutil.Process(process.pid).children(), process]:
                each.kill()


def titles(pids: list[int]) -> list[str]:
    return sorted(psutil.Process(pid).cmdline()[0] for pid in pids)


@pytest.mark.parametrize(
    ("server", "found"),
    [
        (["VLLM::EngineCore", "VLLM::Worker_TP0"], [Path(sys.executable).name]),
        (
            ["VLLM::APIServer_0", "VLLM::EngineCore_DP0", "VLLM::DPCoordinator", "mine::APIServer_1"],
            ["VLLM::APIServer_0", "mine::APIServer_1"],
        ),
    ],
    indirect=["server"],
    ids=["one", "several"],
)
def test_an_api_server_is_the_servers_process_or_those_that_vllm_calls_so(server: int, found: list[str]) -> None:
    def seen() -> list[str]:
        read = processor_seconds([server])
        return [] if read is None else [Path(title).name for title in titles(list(read[0]))]

    assert eventually(lambda: seen() == found), seen()


@pytest.mark.parametrize("server", [["VLLM::APIServer_0", "VLLM::EngineCore"]], indirect=True)
def test_only_api_servers_are_counted(server: int) -> None:
    started = psutil.Process(server).children()
    assert eventually(lambda: all(sum(each.cpu_times()[:2]) > 0.25 for each in started))
    (read,) = processor_seconds([server]) or [{}]
    assert 0.25 < sum(read.values()) < 0.4


def test_a_process_that_cannot_be_read_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert processor_seconds([gone.pid]) is None
    assert processor_seconds([]) is None

    def refused(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "cpu_times", refused)
    assert processor_seconds([os.getpid()]) is None


def test_seconds_are_those_between_two_looks_at_the_same_processes() -> None:
    assert seconds_between([{1: 5.0, 2: 1.0}, {3: 0.0}], [{1: 6.5, 2: 1.25}, {3: 2.0}]) == ((1.5, 0.25), (2.0,))
    assert seconds_between([{1: 5.0}], [{2: 6.5}]) is None
    assert seconds_between(None, [{1: 1.0}]) is None
    assert seconds_between([{1: 1.0}], None) is None


def a_round(seconds: float, tokens: int, taken: tuple[tuple[float, ...], ...] | None) -> RoundSamples:
    return RoundSamples(
        duration_s=seconds, ttft_s=(0.1,), e2e_s=(0.2,), itl_s=(), input_tokens=(8,), output_tokens=(tokens,),
        errors=("",), energy_j=None, api_servers_s=taken,
    )  # fmt: skip


def known(found: ApiServers | None) -> ApiServers:
    assert found is not None
    return found


def test_time_is_per_output_token_and_per_second_of_a_core() -> None:
    assert dataclasses.asdict(
        known(use_of([a_round(2.0, 10_000, ((1.0,),)), a_round(3.0, 30_000, ((1.5,),))]))
    ) == pytest.approx({"servers": 1, "processes": 1, "us_per_token": 62.5, "core_share": 0.5})
    assert dataclasses.asdict(known(use_of([a_round(2.0, 10_000, ((1.0, 0.6),))]))) == pytest.approx(
        {"servers": 1, "processes": 2, "us_per_token": 160.0, "core_share": 0.4}
    )


def test_of_several_servers_all_take_time_and_the_busiest_holds_up() -> None:
    assert dataclasses.asdict(known(use_of([a_round(2.0, 10_000, ((0.2,), (1.2, 1.0)))]))) == pytest.approx(
        {"servers": 2, "processes": 2, "us_per_token": 240.0, "core_share": 0.55}
    )


def test_nothing_is_known_where_a_round_does_not_say_it() -> None:
    assert use_of([a_round(2.0, 10_000, ((1.0,),)), a_round(2.0, 10_000, None)]) is None
    # One start had more of them than another.
    assert use_of([a_round(2.0, 10_000, ((1.0,),)), a_round(2.0, 10_000, ((1.0, 1.0),))]) is None


def test_samples_are_read_back_and_those_of_an_earlier_version_too() -> None:
    made = a_round(2.0, 10_000, ((1.0, 0.5),))
    assert decode(RoundSamples, encode(made), origin="") == made
    earlier = {key: value for key, value in encode(made).items() if key != "api_servers_s"}
    assert decode(RoundSamples, earlier, origin="").api_servers_s is None


def side_with(*uses: ApiServers | None, most: int = 4) -> SideResult:
    """Return a side whose loads, of 1 client and of 16, had API servers as busy as this."""
    side = bench_result().sides[0]
    loads = tuple(dataclasses.replace(load, api_servers=use) for load, use in zip(side.loads, uses, strict=True))
    return dataclasses.replace(side, loads=loads, most_api_servers=most)


def use(share: float, processes: int = 1) -> ApiServers:
    return ApiServers(processes=processes, us_per_token=52.3, core_share=share)


def said(side: SideResult) -> list[str]:
    lines = render(bench_result(sides=(side,), verdicts=())).splitlines()
    at = next((number for number, line in enumerate(lines) if "busy for" in line), None)
    return [] if at is None else lines[at : at + 2]


def test_a_user_is_told_once_of_the_load_that_was_bound_most() -> None:
    assert said(side_with(use(0.65), use(0.744))) == [
        "  16 clients: the API server was busy for 74 % of a core, 52 us a token; more of",
        "    them may help (-- --api-server-count 4)",
    ]
    assert said(side_with(use(0.91), use(0.744)))[0].startswith("  1 client: the API server was busy for 91 %")
    assert said(side_with(None, use(0.7, processes=2)))[0].startswith(
        "  16 clients: the 2 API servers were busy for 70 % of a core each"
    )


@pytest.mark.parametrize(
    "side",
    [
        side_with(None, None),
        side_with(use(0.2), use(0.6)),
        side_with(use(0.5), use(0.3, processes=2)),
        side_with(use(0.9, processes=4), use(0.9, processes=8)),
        side_with(use(0.9), use(0.9), most=1),
    ],
    ids=["not known", "not busy", "several, not busy", "as many as plans start", "vLLM takes one only"],
)
def test_nothing_is_said_where_more_are_no_help(side: SideResult) -> None:
    assert said(side) == []


def waited_for(use: ApiServers | None, *, gap_ms: float = 31.8, tpot_ms: float = 41.4) -> LoadResult:
    """Return a load of 16 clients."""
    load = bench_result().sides[0].loads[1]
    assert load.tpot_ms is not None
    gap, tpot = (dataclasses.replace(load.tpot_ms, median=each) for each in (gap_ms, tpot_ms))
    return dataclasses.replace(load, api_servers=use, itl_ms=gap, tpot_ms=tpot)


@pytest.mark.parametrize(
    ("use", "answered"), [(use(0.95), 16), (use(0.95, processes=4), 4), (dataclasses.replace(use(0.95), servers=2), 8)]
)
def test_the_gap_between_tokens_over_the_clients_of_an_api_server_is_the_most_that_it_takes_for_one(
    use: ApiServers, answered: int
) -> None:
    time = waited_for(use).front_end_time("a test")
    assert time is not None
    assert (time.clients, time.us_per_token) == (answered, pytest.approx(31_800 / answered))


def test_a_gap_with_two_tokens_at_its_end_tells_nothing() -> None:
    assert waited_for(None).front_end_time("") is None
    assert waited_for(use(0.95), gap_ms=40.0, tpot_ms=30.0).front_end_time("") is None
    assert dataclasses.replace(waited_for(use(0.95)), clients=None, rate=2.0).front_end_time("") is None


def test_what_saturated_api_servers_take_is_shown() -> None:
    side = side_with(use(0.7), use(0.95))
    time = side.loads[1].front_end_time("")
    assert time is not None
    told = " ".join(render(bench_result(sides=(side,), verdicts=())).split())
    assert f"for each it takes {time.us_per_token:.0f} us with 16 clients" in told
    assert "for each it takes" not in render(bench_result(sides=(side_with(use(0.7), use(0.7)),), verdicts=()))
