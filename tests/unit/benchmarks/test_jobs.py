"""Jobs on the GPUs of a machine; the GPUs are numbers here, and the commands are shells'."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.jobs import JOBS, ROOT, Jobs, main, visible_gpus
from benchmarks.serving.bench_beside import words_of
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir
from moe_optimizer.yaml_model import read_section
from tests.builders import software
from tests.eventually import eventually, is_running

SHIPPED = read_section(Jobs, JOBS, origin="jobs.yaml", what="jobs")
VALUES = {
    "out": "/o",
    "models": "/m",
    "scratch": "/m",
    "commit": "c",
    "port": "1",
    **{f"gpu{index}": str(index) for index in range(8)},
}
Write = Callable[[dict[str, Any]], list[str]]


@pytest.fixture
def arguments(tmp_path: Path) -> Write:
    """Return what writes a file of jobs and returns the arguments that run all of them on GPUs 4 and 7."""

    def written(jobs: dict[str, Any]) -> list[str]:
        file = tmp_path / "jobs.yaml"
        filled = {name: {"about": "a test", "gpus": 1, "seconds": 60, **job} for name, job in jobs.items()}
        file.write_text(yaml.safe_dump({"jobs": filled}), encoding="utf-8")
        out = tmp_path / "out"
        return [*filled, "--file", str(file), "--out", str(out), "--gpus", "4,7", "--commit", "abc+dirty"]

    return written


def outcomes(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {each["job"]: each for each in json.loads((tmp_path / "out" / "jobs.json").read_text())}


def shell(script: str) -> str:
    return shlex.join(["sh", "-c", script])


@pytest.mark.parametrize("name", SHIPPED.jobs)
def test_a_shipped_job_names_files_models_and_options_that_exist(name: str) -> None:
    SHIPPED.models_of(SHIPPED.jobs[name].run)
    for line in SHIPPED.jobs[name].run:
        words = shlex.split(Template(line).substitute(VALUES))
        assert words[0] == "python"
        paths = [word for word in words if word.startswith(("benchmarks/", "tests/"))]
        assert paths
        assert all((ROOT / path).exists() for path in paths)
        if paths[0].startswith("benchmarks/"):
            source = (ROOT / paths[0]).read_text(encoding="utf-8") + '"--commit"'
            own = words[: words.index("--")] if "--" in words else words
            assert all(f'"{word}"' in source for word in own if word.startswith("--"))
        for flag, value in itertools.pairwise(words):
            if flag == "-k":
                assert any(f"_{value}_" in (ROOT / path).read_text(encoding="utf-8") for path in paths), value
            if flag == "--side":
                side = words_of(value)
                assert side.model.startswith("/m/")
                assert set(side.environment) <= {"CUDA_VISIBLE_DEVICES"}
                assert not any(word.startswith("gpus") for word in side.vllm_args)


def test_a_test_on_a_gpu_that_hangs_ends_when_its_job_says(tmp_path: Path) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text("import threading, pytest\n@pytest.mark.gpu\ndef test_it(): threading.Event().wait()\n")
    words = ["-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--timeout", "1", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--timeout-method", "thread"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout" in done.stdout + done.stderr


def test_the_shapes_of_experts_that_are_timed_have_weights_of_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "ops"))
    from bench_cuda_cases import SHAPES, why_no_weights

    timed = [line for job in SHIPPED.jobs.values() for line in job.run if "bench_cuda_fused_experts.py" in line]
    assert timed
    for line in timed:
        words = shlex.split(line)
        shapes, dtypes = (words[words.index(flag) + 1].split(",") for flag in ("--shapes", "--dtypes"))
        assert {why_no_weights(SHAPES[shape], dtype) for shape in shapes for dtype in dtypes} == {""}


def test_jobs_run_at_once_on_gpus_of_their_own(tmp_path: Path, arguments: Write) -> None:
    # Each goes on when the other has begun.
    meet = "echo $$CUDA_VISIBLE_DEVICES > $out/gpus; until [ -e $out/../{other}/gpus ]; do sleep 0.01; done"
    jobs = {
        "one": {"run": [shell(meet.format(other="two"))]},
        "both": {"gpus": 2, "run": [shell("echo $gpu0 $gpu1 $commit > $out/seen; cat $out/../*/gpus >> $out/seen")]},
        "two": {"run": [shell(meet.format(other="one"))]},
    }
    assert main(arguments(jobs)) == 0
    assert {each["how"] for each in outcomes(tmp_path).values()} == {"ok"}
    first, *others = (tmp_path / "out" / "both" / "seen").read_text().splitlines()
    assert first == "4 7 abc+dirty"
    assert sorted(others) == ["4", "7"]


def test_nothing_runs_for_records_of_no_commit(
    tmp_path: Path, arguments: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.jobs.checkout", lambda _named: {"commit": None, "dirty": None})
    assert main(arguments({"one": {"run": [shell("true")]}})) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_table", [True, False])
def test_kernels_that_no_shipped_table_is_of_are_said_before_plans_do_without_them(
    has_table: bool, arguments: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (table, *_) = (table for path in shipped_dir().glob("*.json") for table in read_tables(path))
    sources = table.kernel_hash if has_table else "0" * 64
    built = dataclasses.replace(software(cuda_ops=("fused_experts",)).kernels, cuda_sources=sources)
    monkeypatch.setattr("benchmarks.jobs.read_kernel_inventory", lambda: built)
    assert main(arguments({"one": {"run": [shell("true")]}})) == 0
    assert ("no shipped table" in capsys.readouterr().err) != has_table


def test_a_job_whose_time_is_over_leaves_nothing_running(
    tmp_path: Path, arguments: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "sleep 1000 & echo $$! > $out/new; mv $out/new $out/pid; wait"
    pid_file = tmp_path / "out" / "long" / "pid"
    # Its time is over when it has started what is to end with it, however long a busy machine takes.
    clock = SimpleNamespace(monotonic=lambda: 100.0 * pid_file.exists(), sleep=time.sleep)
    monkeypatch.setattr("benchmarks.jobs.time", clock)
    assert main(arguments({"long": {"run": [shell(start), shell("true")]}})) == 1
    how = outcomes(tmp_path)["long"]["how"]
    assert "its time was over" in how
    assert "not started" in how
    pid = int(pid_file.read_text())
    eventually(lambda: not is_running(pid), "sleep runs on")


def test_a_failed_command_is_said_and_does_not_stop_the_next(tmp_path: Path, arguments: Write) -> None:
    jobs = {"mixed": {"run": [shell("exit 3"), "no-such-command", shell("echo here > $out/second")]}}
    assert main(arguments(jobs)) == 1
    how = outcomes(tmp_path)["mixed"]["how"]
    assert "exit code 3" in how
    assert "no-such-command" in how
    assert (tmp_path / "out" / "mixed" / "second").exists()


@pytest.mark.parametrize(
    ("needs", "named"),
    [({"gpus": 3}, "3 GPUs"), ({"packages": ["no_such_package"]}, "no_such_package"), ({"commands": ["nope"]}, "nope")],
    ids=["gpus", "package", "command"],
)
def test_what_cannot_run_here_is_left_out_and_the_others_run(
    needs: dict[str, Any], named: str, tmp_path: Path, arguments: Write
) -> None:
    assert main(arguments({"cannot": {**needs, "run": ["true"]}, "can": {"run": ["true"]}})) == 1
    found = outcomes(tmp_path)
    assert "left out" in found["cannot"]["how"]
    assert named in found["cannot"]["how"]
    assert found["can"]["how"] == "ok"


def test_caches_of_a_first_start_are_empty_and_go_with_the_jobs(tmp_path: Path, arguments: Write) -> None:
    keep = "mkdir -p $$VLLM_CACHE_ROOT && echo $$VLLM_CACHE_ROOT > $out/where"
    assert main(arguments({"first": {"empty_caches": True, "run": [shell(keep)]}})) == 0
    assert not Path((tmp_path / "out" / "first" / "where").read_text().strip()).exists()


def test_sigterm_ends_what_runs_and_what_waits(tmp_path: Path, arguments: Write) -> None:
    jobs = {
        "runs": {"gpus": 2, "run": [shell("sleep 1000 & echo $$! > $out/pid; wait")]},
        "waits": {"run": [shell("touch $out/ran")]},
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "jobs.py"), *arguments(jobs)]
    pid_file = tmp_path / "out" / "runs" / "pid"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            pid = int(eventually(lambda: pid_file.exists() and pid_file.read_text().strip(), "it did not start"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 1
        finally:
            process.kill()
    eventually(lambda: not is_running(pid), "sleep runs on")
    found = outcomes(tmp_path)
    assert "stopped" in found["runs"]["how"]
    assert "stopped" in found["waits"]["how"]
    assert not (tmp_path / "out" / "waits" / "ran").exists()


@pytest.mark.parametrize(
    ("says", "found"), [("echo 0; echo 1", ("0", "1")), ("echo NVIDIA-SMI has failed; exit 9", ())], ids=["two", "none"]
)
def test_gpus_are_those_of_nvidia_smi_and_none_without_a_driver(
    says: str, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == found


def test_a_job_that_there_is_not_is_refused(
    tmp_path: Path, arguments: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["wrong", *arguments({"right": {"run": ["true"]}})]) == 2
    assert "'wrong'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
