"""The servers that tune keeps up between two measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.measure.bench.side import RunningSide, Side
from moe_optimizer.measure.tune import server_pool
from moe_optimizer.measure.tune.server_pool import ServerPool
from tests.builders import cpu_machine, made_plan, tiny_moe


class Paper(RunningSide):
    """A server that answers nobody."""

    def check_alive(self, name: str) -> None:
        if name == "dying":
            raise ServerFailedError(name)


class Servers:
    """What started, was told to end, and has stopped."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.told: set[str | None] = set()

    @contextlib.contextmanager
    def starting(self, side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[Callable[[], RunningSide]]:
        assert side.plan is not None
        self.told.add(side.plan.serve_args.value("--max-logprobs"))
        self.seen.append(f"{side.name} starts")
        try:
            yield lambda: Paper(
                base_url=side.name, model="paper", max_model_len=1, ready_s=1.0, info=None,
                ask_to_stop=lambda: self.seen.append(f"{side.name} is asked"),
            )  # fmt: skip
        finally:
            self.seen.append(f"{side.name} stops")

    @property
    def starts(self) -> list[str]:
        return [each.removesuffix(" starts") for each in self.seen if each.endswith(" starts")]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(server_pool, "starting", made.starting)
    return made


def measure(pool: ServerPool, *names: str, failure: BaseException | None = None) -> list[str]:
    """Start the servers of a measurement; return which answered."""
    sides = [Side(name=each, plan=made_plan(tiny_moe(), cpu_machine())) for each in names]
    start = pool.start_of(sides, names, pool.slots_for(names))
    with contextlib.ExitStack() as stack:
        waits = [stack.enter_context(start(each, run_dir=Path("x"), ready_timeout_s=1.0)) for each in sides]
        found = [wait() for wait in waits]
        for each in found:
            each.ask_to_stop()
        if failure is not None:
            raise failure
    return [each.base_url for each in found]


def test_a_server_that_is_asked_for_again_is_not_started_again(servers: Servers) -> None:
    pool = ServerPool(top_logprobs=64)
    for pair in (("plan", "stock"), ("plan", "without a"), ("with b", "plan"), ("plan",), ("plan", "stock")):
        assert measure(pool, *pair) == list(pair)
    assert servers.starts == ["plan", "stock", "without a", "with b", "stock"]
    assert servers.told == {"64"}


def test_a_server_keeps_its_slot_whichever_side_it_is(servers: Servers) -> None:
    pool = ServerPool(top_logprobs=64)
    measure(pool, "plan", "stock")
    assert pool.slots_for(["other", "plan"]) == (1, 0)
    assert pool.slots_for(["stock", "plan"]) == (1, 0)


def test_the_one_unused_for_longest_makes_room(servers: Servers) -> None:
    pool = ServerPool(top_logprobs=64)
    measure(pool, "a", "b")
    measure(pool, "a")
    measure(pool, "c")
    assert servers.seen[2:] == ["b is asked", "b stops", "c starts"]


def test_all_end_at_the_same_time(servers: Servers) -> None:
    pool = ServerPool(top_logprobs=64)
    measure(pool, "a", "b")
    assert pool.slowest_stop_s is None
    pool.close()
    assert servers.seen[2:] == ["a is asked", "b is asked", "b stops", "a stops"]
    assert pool.slowest_stop_s is not None


def test_a_measurement_that_fails_stops_its_servers_and_an_interrupted_one_all(servers: Servers) -> None:
    pool = ServerPool(top_logprobs=64)
    measure(pool, "a", "b")
    with pytest.raises(ServerFailedError):
        measure(pool, "a", failure=ServerFailedError("x"))
    assert [each for each in servers.seen if each.endswith("stops")] == ["a stops"]
    with pytest.raises(KeyboardInterrupt):
        measure(pool, "c", failure=KeyboardInterrupt())
    assert {each for each in servers.seen if each.endswith("stops")} == {"a stops", "b stops", "c stops"}


def test_one_that_has_died_meanwhile_is_started_again(servers: Servers) -> None:
    pool = ServerPool(top_logprobs=64)
    for _ in range(2):
        measure(pool, "dying")
    assert servers.starts == ["dying", "dying"]
