"""The phases that a start reaches, from the log, and the estimate from the start before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_optimizer.launcher.start_up_progress import StartUpProgress
from tests.builders import cpu_machine, made_plan, tiny_moe

ENGINE = "(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0)\n"
LOADING = "(Worker pid=2) INFO [cpu_model_runner.py:68] Starting to load model\n"
LOADED = "(Worker pid=2) INFO [default_loader.py:501] Loading weights took 0.48 seconds\n"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows: the first entry."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def start(now: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StartUpProgress, Path, list[str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    plan = made_plan(tiny_moe(), cpu_machine())
    return StartUpProgress(plan, tmp_path / "server.log", said.append), tmp_path / "server.log", said


Start = tuple[StartUpProgress, Path, list[str]]


def test_each_phase_is_said_once_also_from_a_line_that_is_written_in_two_parts(start: Start, now: list[float]) -> None:
    progress, log, said = start
    progress.look()
    assert said == ["importing vLLM"]
    for until in (len(ENGINE) - 20, len(ENGINE), len(ENGINE + LOADING)):
        now[0] += 3.0
        log.write_text((ENGINE + LOADING)[:until])
        progress.look()
    assert said[1:] == [
        "importing vLLM 6 s; starting engine and workers",
        "starting engine and workers 3 s; loading weights",
    ]


def test_the_ledger_of_a_start_gets_the_seconds_of_each_phase(start: Start, now: list[float]) -> None:
    progress, log, _ = start
    for text, seconds in ((ENGINE, 4.0), (ENGINE + LOADING, 2.0)):
        now[0] += seconds
        log.write_text(text)
        progress.look()
        progress.look()
    now[0] += 7.5
    progress.ended()
    assert progress.phases_s == {"importing vLLM": 4.0, "starting engine and workers": 2.0, "loading weights": 7.5}


def test_a_phase_that_the_log_does_not_name_is_passed_over(start: Start) -> None:
    progress, log, said = start
    log.write_text(LOADED)
    progress.look()
    assert said[1:] == ["importing vLLM 0 s; compiling and sizing the cache"]


def test_the_next_start_says_at_once_how_long_this_one_took(start: Start, now: list[float]) -> None:
    progress, log, _ = start
    now[0] += 41.0
    progress.ended()
    said: list[str] = []
    StartUpProgress(made_plan(tiny_moe(), cpu_machine()), log, said.append)
    assert said == ["importing vLLM; about 41 s in all, as the last start"]


def test_on_a_terminal_one_line_has_it_all_and_the_phases_are_said_at_the_end(start: Start, now: list[float]) -> None:
    now[0] += 41.0
    start[0].ended()
    log, said, shown = start[1], list[str](), list[str]()
    progress = StartUpProgress(made_plan(tiny_moe(), cpu_machine()), log, said.append, shown.append)
    for text in ("", ENGINE, ENGINE + LOADING):
        now[0] += 3.0
        log.write_text(text)
        progress.look()
    assert said == []
    assert shown == [
        "3 s of about 41 s: importing vLLM 3 s",
        "6 s of about 41 s: starting engine and workers 0 s, importing vLLM 6 s",
        "9 s of about 41 s: loading weights 0 s, starting engine and workers 3 s, importing vLLM 6 s",
    ]
    now[0] += 2.0
    progress.ended()
    assert said == ["importing vLLM 6 s, starting engine and workers 3 s, loading weights 2 s"]


def test_a_pipe_where_the_last_start_is_kept_is_passed_over(start: Start, tmp_path: Path) -> None:
    progress, log, _ = start
    progress.ended()
    (kept,) = (tmp_path / "cache").rglob("*.seconds")
    kept.unlink()
    os.mkfifo(kept)
    said: list[str] = []
    StartUpProgress(made_plan(tiny_moe(), cpu_machine()), log, said.append)
    assert said == ["importing vLLM"]
