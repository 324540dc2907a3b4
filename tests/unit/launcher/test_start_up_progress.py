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
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StartUpProgress, Path, list[str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    plan = made_plan(tiny_moe(), cpu_machine())
    return StartUpProgress(plan, tmp_path / "server.log", said.append), tmp_path / "server.log", said


Start = tuple[StartUpProgress, Path, list[str]]


def test_each_phase_is_said_once_also_from_a_line_that_is_written_in_two_parts(start: Start) -> None:
    progress, log, said = start
    progress.look()
    assert said == ["importing vLLM"]
    for until in (len(ENGINE) - 20, len(ENGINE), len(ENGINE + LOADING)):
        log.write_text((ENGINE + LOADING)[:until])
        progress.look()
    assert said[1:] == [
        "importing vLLM 0 s; starting engine and workers",
        "starting engine and workers 0 s; loading weights",
    ]


def test_the_ledger_of_a_start_gets_the_seconds_of_each_phase(start: Start) -> None:
    progress, log, _ = start
    log.write_text(ENGINE + LOADING)
    progress.look()
    progress.look()
    progress.ended()
    assert list(progress.phases_s) == ["importing vLLM", "starting engine and workers", "loading weights"]
    assert all(0 <= seconds < 60 for seconds in progress.phases_s.values())


def test_a_phase_that_the_log_does_not_name_is_passed_over(start: Start) -> None:
    progress, log, said = start
    log.write_text(LOADED)
    progress.look()
    assert said[1:] == ["importing vLLM 0 s; compiling and sizing the cache"]


def test_the_next_start_says_at_once_how_long_this_one_took(start: Start) -> None:
    progress, log, _ = start
    progress.ended()
    said: list[str] = []
    StartUpProgress(made_plan(tiny_moe(), cpu_machine()), log, said.append)
    assert said == ["importing vLLM; about 0 s in all, as the last start"]


def test_on_a_terminal_one_line_has_it_all_and_the_phases_are_said_at_the_end(start: Start) -> None:
    start[0].ended()
    log, said, shown = start[1], list[str](), list[str]()
    progress = StartUpProgress(made_plan(tiny_moe(), cpu_machine()), log, said.append, shown.append)
    for text in ("", ENGINE, ENGINE + LOADING):
        log.write_text(text)
        progress.look()
    assert said == []
    assert shown == [
        "0 s of about 0 s: importing vLLM 0 s",
        "0 s of about 0 s: starting engine and workers 0 s, importing vLLM 0 s",
        "0 s of about 0 s: loading weights 0 s, starting engine and workers 0 s, importing vLLM 0 s",
    ]
    progress.ended()
    assert said == ["importing vLLM 0 s, starting engine and workers 0 s, loading weights 0 s"]


def test_a_pipe_where_the_last_start_is_kept_is_passed_over(start: Start, tmp_path: Path) -> None:
    progress, log, _ = start
    progress.ended()
    (kept,) = (tmp_path / "cache").rglob("*.seconds")
    kept.unlink()
    os.mkfifo(kept)
    said: list[str] = []
    StartUpProgress(made_plan(tiny_moe(), cpu_machine()), log, said.append)
    assert said == ["importing vLLM"]
