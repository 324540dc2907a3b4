"""What a server's counters say of its requests, and whether it gets on with them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.launcher.heartbeat import Heartbeat
from moe_optimizer.launcher.served import Served
from moe_optimizer.launcher.traffic import Traffic, read_traffic
from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.step_count import StepCount

PAGE = """\
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:request_success_total{engine="0",finished_reason="stop"} %d.0
vllm:request_success_total{engine="0",finished_reason="length"} 1.0
vllm:kv_cache_usage_perc{engine="0"} %s
"""


TWO_ENGINES = """\
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:generation_tokens_total{engine="0"} %d.0
vllm:generation_tokens_total{engine="1"} 5.0
"""


class Client:
    """A server whose pages are given one after the other; None: it does not answer."""

    def __init__(self, *pages: str | None) -> None:
        self._pages = list(pages)
        self.is_paused = False

    def paused(self) -> bool:
        return self.is_paused

    def metrics(self, *names: str, timeout_s: float) -> str:
        page = self._pages.pop(0)
        if page is None:
            raise ConnectionError
        return page


def client(*pages: str | None) -> Any:
    return Client(*pages)


def test_running_and_waiting_requests_are_unfinished_and_all_ends_count() -> None:
    assert read_traffic(client(PAGE % (10, "0.5"))) == {"0": Traffic(6, 11, (6, 11, 0.0, 0.0, 0.5))}
    assert read_traffic(client("")) is None


def test_a_server_that_had_no_request_yet_counts_all_the_same() -> None:
    beat = Heartbeat(client("# HELP vllm:num_requests_running Number of requests\n", ""))
    beat.beat()
    assert beat.counts
    beat.beat()
    assert not beat.counts


@pytest.fixture
def ten_seconds_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 5.0)
    monkeypatch.setattr("time.monotonic", lambda: next(now))


@pytest.mark.usefixtures("ten_seconds_a_beat")
def test_one_engine_that_stands_still_is_seen_beside_one_that_gets_on() -> None:
    beat = Heartbeat(client(*(TWO_ENGINES % tokens for tokens in range(6))))
    stalled = [beat.beat() for _ in range(6)]
    assert stalled[-1] > stalled[1] + 20
    engines = tuple(Proof(role="engine", rank=rank, pid=90 + rank, plan_digest="", versions={}) for rank in range(2))
    said = beat.in_words(stalled[-1], 4, engines)
    assert "engine core 91 does not answer" in said
    assert "90" not in said


@pytest.mark.usefixtures("ten_seconds_a_beat")
def test_requests_of_which_a_stopped_engine_knows_nothing_stand_still() -> None:
    # vLLM's gauges are what the engine said last: that it had nothing to do. Further requests are no progress.
    idle = 'vllm:num_requests_running{engine="0"} 0.0\nmoe_optimizer_unfinished_requests{engine="0"} %d.0\n'
    beat = Heartbeat(client(*(idle % requests for requests in (0, 0, 1, 2, 1, 2, 0))))
    stalled = [beat.beat() for _ in range(7)]
    assert stalled[5] > stalled[1] + 20
    assert stalled[6] == stalled[1]


@pytest.mark.usefixtures("ten_seconds_a_beat")
@pytest.mark.parametrize("how", ["paused", "asleep", "working"])
def test_requests_that_wait_on_purpose_do_not_stand_still(how: str) -> None:
    asleep = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {int(how != "asleep")}.0\n'
    paused = client(*[PAGE % (10, "0.1") + asleep] * 6)
    paused.is_paused = how == "paused"
    beat = Heartbeat(paused)
    stalled = [beat.beat() for _ in range(6)]
    assert (stalled[-1] > 30) == (how == "working")


@pytest.mark.usefixtures("ten_seconds_a_beat")
def test_a_long_prompt_gets_on_while_the_cache_fills() -> None:
    beat = Heartbeat(client(*(PAGE % (10, usage) for usage in ("0.1", "0.2", "0.2", "0.2", "0.3"))))
    stalled = [beat.beat() for _ in range(5)]
    assert stalled[3] > stalled[2] > stalled[1] == stalled[4]


def test_a_server_that_does_not_answer_makes_no_progress_and_is_warned_of_once() -> None:
    beat = Heartbeat(client(PAGE % (10, "0.1"), None, None))
    beat.beat()
    assert beat.beat() > 0
    assert [beat.warning(seconds) for seconds in (9, 10, 11, 0, 12)] == [False, True, False, False, True]
    assert "API server 4 " in beat.in_words(12, 4, ())


def test_a_server_too_busy_to_answer_makes_progress_while_its_workers_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    worker = Proof(role="worker", rank=0, pid=90, plan_digest="", versions={})
    count = StepCount(tmp_path, worker)
    beat = Heartbeat(client(PAGE % (10, "0.1"), *[None] * 12), run_dir=tmp_path)
    beat.beat()
    for _ in range(6):
        count.step()
        stalled_s = beat.beat()
    assert stalled_s < 30
    assert [beat.beat() for _ in range(6)][-1] > stalled_s + 50


def test_what_passes_while_the_launcher_itself_is_stopped_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    beat = Heartbeat(client(*[PAGE % (10, "0.1")] * 8, None), seen_within_s=8.0)
    beat.beat()
    for seconds in (1, 1, 3600):
        now[0] += seconds
        stalled_s = beat.beat()
    assert stalled_s == 10
    for _ in range(4):
        now[0] += 8
        stalled_s = beat.beat()
    assert stalled_s == 42, "a server that stands still after it too is seen as soon as without it"
    now[0] += 3600
    assert beat.beat() == 50, "one that does not answer yet has not stood still for longer either"


def test_the_sum_leaves_out_what_came_before_and_counts_a_shared_request_once() -> None:
    for together, asked in ((False, 10), (True, 5)):
        said: list[str] = []
        served = Served()
        with served.summed_up(said.append):
            served.begin([Heartbeat(client(PAGE % (10, "0"), PAGE % (15, "0"))) for _ in range(2)], together=together)
            finishing = served.to_finish(30.0)
        assert finishing.startswith(f": finishing {6 if together else 12} requests, up to 30 s")
        assert said[-1].endswith(f", {asked} requests, exit code 0")


def test_the_sum_goes_on_over_a_restart() -> None:
    said: list[str] = []
    served = Served()
    with served.summed_up(said.append):
        served.begin([Heartbeat(client(PAGE % (10, "0"), PAGE % (15, "0")))], together=False)
        served.to_finish(30.0)
        served.restarts += 1
        served.begin([Heartbeat(client(PAGE % (0, "0"), PAGE % (2, "0")))], together=False)
        served.to_finish(30.0)
    assert said[-1].endswith(", 7 requests, 1 restart, exit code 0")
