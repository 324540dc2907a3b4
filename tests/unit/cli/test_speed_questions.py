"""What is measured before a start, and when."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.cli import speed_questions
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.measure.kernel_speeds import tables
from tests.builders import cpu_machine, made_plan, tiny_moe

QUIET = ProgressLines(verbose=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that would have been measured, without an error."""
    seen: list[Any] = []

    def measure(asked: Any, *, on_step: Any) -> None:
        on_step(0.5, "1 tokens")
        seen.append(asked)

    monkeypatch.setattr(tables, "measure_speeds", measure)
    return seen


def plan(**changes: Any) -> Any:
    return made_plan(tiny_moe(), cpu_machine(cores=4), **changes)


def test_a_question_of_the_plan_is_measured_on_the_threads_of_a_worker(measured: list[Any]) -> None:
    assert speed_questions.measure_if_needed(plan(), 5.0, QUIET)
    (asked,) = measured
    # One of four cores is left to vLLM's scheduler.
    assert (asked.device, asked.seconds, asked.cores) == ("cpu", 5.0, (0, 1, 2))
    assert [question.device.split(", ")[-1] for question in asked.questions] == ["3 threads"]
    assert asked.environment == {"VLLM_CPU_KVCACHE_SPACE": "1"}


def test_a_pipe_is_told_at_once_and_of_each_step(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []
    measure = tables.measure_speeds

    def listen(asked: Any, *, on_step: Any) -> None:
        heard.append(capsys.readouterr().err)
        measure(asked, on_step=on_step)

    monkeypatch.setattr(tables, "measure_speeds", listen)
    speed_questions.measure_if_needed(plan(), 5.0, ProgressLines(verbose=False))
    assert "5 s" in heard[0]
    assert "50%" in capsys.readouterr().err


def test_two_workers_share_the_processor(measured: list[Any]) -> None:
    speed_questions.measure_if_needed(plan(vllm_args=("--tensor-parallel-size", "2")), 5.0, QUIET)
    assert measured[0].cores == (0, 1)


def test_with_zero_seconds_nothing_is_measured(measured: list[Any]) -> None:
    assert not speed_questions.measure_if_needed(plan(), 0.0, QUIET)
    assert measured == []


def test_a_plan_without_a_question_is_not_measured(measured: list[Any]) -> None:
    settled = plan()
    decisions = tuple(dataclasses.replace(each, params=None) for each in settled.decisions)
    assert not speed_questions.measure_if_needed(settled.replace(decisions=decisions), 5.0, QUIET)
    assert measured == []


def test_what_cannot_be_measured_is_a_warning_and_the_start_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Any, *, on_step: Any) -> None:
        raise MoeOptimizerError("exit 1: out of memory")

    monkeypatch.setattr(tables, "measure_speeds", fail)
    assert not speed_questions.measure_if_needed(plan(), 5.0, QUIET)
    assert "out of memory" in caplog.text
