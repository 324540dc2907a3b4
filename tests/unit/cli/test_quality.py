"""The quality command: what it refuses, and the exit code of a plan that fails."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode
from moe_optimizer.launcher import launch
from moe_optimizer.measure.bench import side
from moe_optimizer.measure.bench.side import RunningSide
from moe_optimizer.measure.quality import run
from moe_optimizer.measure.quality.request import QualityRequest
from tests.builders.quality import failure, quality_result

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[QualityRequest]:
    """Requests, instead of servers that would answer them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    requests: list[QualityRequest] = []

    def kept(request: QualityRequest, **others: Any) -> Any:
        requests.append(request)
        return quality_result(failed=(failure(),) if request.top_logprobs == 20 else ())

    monkeypatch.setattr(run, "run_quality", kept)
    monkeypatch.setattr("moe_optimizer.cli.preflight.check_can_serve_here", lambda *_: None)
    monkeypatch.setattr(launch, "check", lambda *_, **__: None)
    return requests


def test_a_plan_that_is_kept_ends_with_0(asked: list[QualityRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", TINY_MOE, "--calibrate", "0", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["failed"] == []
    (request,) = asked
    assert request.thresholds["kl_mean"] == 0.0004
    assert request.top_logprobs == 64
    assert len(request.texts) == 7


def test_a_plan_that_is_not_kept_ends_with_5_and_names_the_pass(
    asked: list[QualityRequest], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("name: mine\nquality: {top_logprobs: 20, kl_mean: null}\n")
    assert main(["quality", TINY_MOE, "--calibrate", "0", "--profile", str(profile)]) == ExitCode.QUALITY_FAILED
    out = capsys.readouterr().out
    assert "fp8: kl_mean 0.02" in out
    assert max(map(len, out.splitlines())) <= 80
    assert asked[0].thresholds["kl_mean"] is None


def test_each_pass_is_planned_alone_with_what_it_cannot_do_without(asked: list[QualityRequest]) -> None:
    assert main(["quality", TINY_MOE, "--calibrate", "0", "--enable-fp8", "--enable-flash-dmoe"]) == ExitCode.OK
    alone = asked[0].alone
    assert alone["fp8"].with_passes == ("flash_dmoe",)
    assert "fp8" in alone["fp8"].side.passes
    assert "fp8" not in alone["flash_dmoe"].side.passes
    assert "expert_load" not in alone["flash_dmoe"].side.passes


def test_a_server_named_by_its_url_is_asked_for_what_it_may_tell(
    asked: list[QualityRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = RunningSide(base_url="http://127.0.0.1:1", model="m", max_model_len=512, ready_s=None, info=None)
    monkeypatch.setattr(side, "ask", lambda url: answers)
    arguments = ["--calibrate", "0", "--against", "http://127.0.0.1:1/v1"]
    assert main(["quality", TINY_MOE, *arguments]) == ExitCode.QUALITY_FAILED
    assert asked[0].top_logprobs == 20
    assert asked[0].reference.url == "http://127.0.0.1:1"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_tasks_without_the_harness_name_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", TINY_MOE, "--tasks", "mmlu"]) == ExitCode.UNSUPPORTED
    assert "moe-optimizer[eval]" in capsys.readouterr().err


def test_a_name_that_is_no_task_is_refused_before_anything_starts(
    asked: list[QualityRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index of names is a stand-in: the harness is no dependency of the tests."""
    package = tmp_path / "site" / "lm_eval" / "tasks"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("class TaskManager:\n    all_tasks = ['mmlu', 'gsm8k']\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]), prepend=os.pathsep)
    monkeypatch.syspath_prepend(package.parents[1])
    assert main(["quality", TINY_MOE, "--calibrate", "0", "--tasks", "mmlu,gsm8"]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "gsm8" in said
    assert "did you mean gsm8k?" in said
    assert not asked
    assert main(["quality", TINY_MOE, "--calibrate", "0", "--tasks", "mmlu,gsm8k"]) == ExitCode.OK


@pytest.mark.parametrize("option", ["--data", "--prompts"])
def test_an_empty_file_is_bad_input(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert main(["quality", TINY_MOE, option, str(empty)]) == ExitCode.BAD_INPUT
    assert str(empty) in capsys.readouterr().err


def test_a_url_cannot_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", TINY_MOE, "--plan", "http://127.0.0.1:1"]) == ExitCode.BAD_INPUT
    assert "--against" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--task-limit", "--task-data"])
def test_a_limit_or_data_of_tasks_that_there_are_not_is_refused(
    option: str, asked: list[QualityRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", TINY_MOE, option, "5"]) == ExitCode.BAD_INPUT
    assert option in capsys.readouterr().err


def test_data_of_tasks_that_is_no_folder_is_refused(
    asked: list[QualityRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert main(["quality", TINY_MOE, "--tasks", "mmlu", "--task-data", missing]) == ExitCode.BAD_INPUT
    assert "--task-data" in capsys.readouterr().err
    assert not asked


def test_a_pass_of_a_files_plan_is_alone_with_the_users_arguments(
    asked: list[QualityRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--enable-flash-dmoe", "--json", "--", "--max-model-len", "300"]
    assert main(["plan", TINY_MOE, *arguments]) == ExitCode.OK
    file = tmp_path / "a.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["quality", TINY_MOE, "--plan", str(file)]) == ExitCode.OK
    alone = asked[0].alone["flash_dmoe"].side.plan
    assert alone is not None
    assert alone.serve_args.value("--max-model-len") == "300"
