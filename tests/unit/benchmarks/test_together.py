"""Planned servers that start at once and are loaded in turns: starts and loads are stand-ins."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import together
from moe_optimizer.errors import ServerFailedError
from moe_optimizer.measure.bench import run
from moe_optimizer.measure.bench.result import MemoryUse
from moe_optimizer.measure.bench.side import RunningSide, Side, StartFacts, read_start, start_path
from moe_optimizer.measure.bench.trace import read_trace
from moe_optimizer.measure.bench.vllm_load import LoadRequest
from tests.builders import cpu_machine, made_plan, tiny_moe


class Paper(RunningSide):
    """A server that answers nobody."""

    def check_alive(self, name: str) -> None:
        pass

    def facts(self) -> StartFacts:
        memory = MemoryUse(gpu_bytes=None, process_bytes=None)
        return StartFacts(ready_s=self.ready_s, memory=memory, compilations=None)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What measures two plans; the one called `broken` does not start."""

    @contextlib.contextmanager
    def starting(side: Side, **_: Any) -> Iterator[Callable[[], RunningSide]]:
        def wait() -> RunningSide:
            if side.name == "broken":
                raise ServerFailedError("it ended")
            return Paper(base_url=f"http://{side.name}", model="m", max_model_len=8192, ready_s=7.0, info=None)

        yield wait

    def send(_module: str, load: LoadRequest, **_: Any) -> None:
        for each in load.rounds:
            requests = read_trace(Path(each.trace))
            count = len(requests)
            samples = {
                "duration_s": 1.0, "ttft_s": [0.1] * count, "e2e_s": [1.0] * count, "itl_s": [],
                "input_tokens": [one.input_length for one in requests],
                "output_tokens": [one.output_length for one in requests], "errors": [""] * count, "energy_j": None,
            }  # fmt: skip
            Path(each.samples).write_text(json.dumps(samples), encoding="utf-8")

    monkeypatch.setattr(together, "starting", starting)
    monkeypatch.setattr(run, "run_measurement", send)
    plans = [tmp_path / f"{name}.json" for name in ("one", "two", "broken")]
    for path in plans:
        path.write_text(made_plan(tiny_moe(), cpu_machine()).to_json(), encoding="utf-8")
    words = ["together.py", str(tmp_path / "run"), "--tokenizer", "t", "--workload", "small", "--repetitions", "1"]
    return [*words, *map(str, plans)]


def test_every_plan_leaves_its_samples_and_the_facts_of_its_start(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", command[:-1])
    assert together.main() == 0
    run_folder = tmp_path / "run"
    assert [read_start(start_path(run_folder, f"server-{each}")).ready_s for each in (0, 1)] == [7.0, 7.0]
    counted = [each.name for each in run_folder.glob("side-*.json") if "warm-up" not in each.name]
    assert len(counted) == 2 * 2  # sides and loads


def test_one_that_does_not_start_ends_it_and_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="broken: it ended"):
        together.main()
    assert not list((tmp_path / "run").glob("side-*.json"))
