"""`report` and `compare` from the command line: exit codes, files, what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode
from moe_optimizer.measure.bench.result import RESULT_FILE
from moe_optimizer.plan.json_codec import encode
from tests.builders.results import bench_result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / RESULT_FILE).write_text(json.dumps(encode(bench_result())))
    return tmp_path


def test_the_report_of_a_folder_is_written_into_it(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run)]) == ExitCode.OK
    assert str(run / "report.html") in capsys.readouterr().out
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_json_names_the_file(run: Path, capsys: pytest.CaptureFixture[str]):
    target = run / "a.html"
    assert main(["report", str(run / RESULT_FILE), "--html", str(target), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"html": str(target)}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["report"], "SOURCE"),
        (["report", "absent"], "absent"),
        (["report", "{run}", "--html", "{run}"], "is a folder"),
        (["report", "{run}", "--html", "{run}/no/a.html"], "folder does not exist"),
        (["bench", "a-model", "--html", "{run}/no/a.html"], "folder does not exist"),
        (["compare", "{run}"], "A and B"),
        (["compare", "{run}", "absent"], "absent"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], word: str, run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([each.format(run=run) for each in arguments]) == ExitCode.BAD_INPUT
    assert word in capsys.readouterr().err


def test_two_results_are_compared_and_other_machines_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    other = run / "other.json"
    other.write_text(json.dumps(encode(bench_result(environment={**bench_result().environment, "device": "another"}))))
    assert main(["compare", str(run), str(run)]) == ExitCode.OK
    assert "1.000x" in capsys.readouterr().out
    assert main(["compare", str(run), str(other)]) == ExitCode.BAD_INPUT
    assert "device" in capsys.readouterr().err
    assert main(["compare", str(run), str(other), "--allow-different", "--json"]) == ExitCode.OK
    assert list(json.loads(capsys.readouterr().out)["different"]) == ["device"]
