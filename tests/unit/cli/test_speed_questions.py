"""What is measured before a start, and when."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.cli import speed_questions
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.measure.kernel_speeds import calibration
from moe_optimizer.planner import make_plan
from tests.builders import cpu_machine, request, tiny_moe

QUIET = ProgressLines(verbose=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that would have been measured; `calibrate` says that all went well."""
    seen: list[Any] = []

    def calibrate(asked: Any, *, on_step: Any) -> str:
        on_step(1, 2, "1 tokens")
        seen.append(asked)
        return ""

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    return seen


def plan(**changes: Any) -> Any:
    return make_plan(request(tiny_moe(), cpu_machine(cores=4), **changes))


def test_a_question_of_the_plan_is_measured_on_the_threads_of_a_worker(measured: list[Any]) -> None:
    assert speed_questions.measure_if_needed(plan(), 5.0, QUIET)
    (asked,) = measured
    assert (asked.device, asked.seconds, asked.threads) == ("cpu", 5.0, 4)
    assert [question.device for question in asked.questions] == ["Test CPU (avx2), 4 threads"]


def test_two_workers_share_the_processor(measured: list[Any]) -> None:
    speed_questions.measure_if_needed(plan(vllm_args=("--tensor-parallel-size", "2")), 5.0, QUIET)
    assert measured[0].threads == 2


def test_with_zero_seconds_nothing_is_measured(measured: list[Any]) -> None:
    assert not speed_questions.measure_if_needed(plan(), 0.0, QUIET)
    assert measured == []


def test_a_plan_without_a_question_is_not_measured(measured: list[Any]) -> None:
    settled = plan()
    decisions = tuple(dataclasses.replace(each, params=None) for each in settled.decisions)
    assert not speed_questions.measure_if_needed(settled.replace(decisions=decisions), 5.0, QUIET)
    assert measured == []


def test_what_cannot_be_measured_is_a_warning_and_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda request, *, on_step: "exit 1: out of memory")
    warned: list[str] = []
    monkeypatch.setattr(speed_questions._LOGGER, "warning", lambda text, *args: warned.append(text % args))
    assert not speed_questions.measure_if_needed(plan(), 5.0, QUIET)
    assert warned == ["kernels are not measured: exit 1: out of memory"]
