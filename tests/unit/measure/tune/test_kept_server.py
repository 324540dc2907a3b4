"""The server that tune keeps up between two measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.measure.bench.side import RunningSide, Side
from moe_optimizer.measure.tune import kept_server
from moe_optimizer.measure.tune.kept_server import KeptServer
from moe_optimizer.planner import make_plan
from tests.builders import cpu_machine, request, tiny_moe


class Paper(RunningSide):
    """A server that answers nobody."""

    def check_alive(self, name: str) -> None:
        if self.model == "dead":
            raise ServerFailedError(name)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What started and stopped."""
    found: list[str] = []

    @contextlib.contextmanager
    def starting(side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[Callable[[], RunningSide]]:
        found.append(f"{side.name} starts")
        try:
            model = "dead" if side.name == "dying" else "paper"
            yield lambda: Paper(base_url=side.name, model=model, max_model_len=1, ready_s=1.0, info=None)
        finally:
            found.append(f"{side.name} stops")

    monkeypatch.setattr(kept_server, "starting", starting)
    return found


def side(name: str) -> Side:
    return Side(name=name, plan=make_plan(request(tiny_moe(), cpu_machine())))


def measure(kept: KeptServer, *sides: Side) -> list[str]:
    """Start the servers of a measurement; return which answered."""
    with contextlib.ExitStack() as stack:
        waits = [stack.enter_context(kept.starting(each, run_dir=Path("x"), ready_timeout_s=1.0)) for each in sides]
        return [wait().base_url for wait in waits]


def test_the_wanted_server_answers_several_measurements_and_the_others_one(seen: list[str]) -> None:
    kept, whole = KeptServer(), side("whole")
    for other in ("a", "b"):
        kept.keep(whole)
        assert measure(kept, whole, side(other)) == ["whole", other]
    kept.close()
    assert seen == ["whole starts", "a starts", "a stops", "b starts", "b stops", "whole stops"]


def test_it_stops_when_none_is_wanted_any_more(seen: list[str]) -> None:
    kept, whole = KeptServer(), side("whole")
    kept.keep(whole)
    measure(kept, whole)
    assert kept.is_up
    kept.keep(None)
    assert not kept.is_up
    assert seen[-1] == "whole stops"


def test_a_measurement_that_fails_leaves_no_server(seen: list[str]) -> None:
    kept, whole = KeptServer(), side("whole")
    kept.keep(whole)

    def fail(failure: BaseException) -> None:
        with kept.starting(whole, run_dir=Path("x"), ready_timeout_s=1.0) as wait:
            wait()
            raise failure

    for failure in (ServerFailedError("x"), KeyboardInterrupt()):
        with pytest.raises(type(failure)):
            fail(failure)
        assert not kept.is_up
    assert seen == ["whole starts", "whole stops"] * 2


def test_one_that_has_died_meanwhile_is_started_again(seen: list[str]) -> None:
    kept, dying = KeptServer(), side("dying")
    for _ in range(2):
        kept.keep(dying)
        measure(kept, dying)
    kept.close()
    assert seen == ["dying starts", "dying stops"] * 2
