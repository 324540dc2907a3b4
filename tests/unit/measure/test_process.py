"""A measuring process and the one that waits for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError, MoeOptimizerError, UnsupportedError
from moe_optimizer.measure.process import MeasurementError, run_measurement
from tests.eventually import eventually, is_running

ROOT = Path(__file__).resolve().parents[3]


def run(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[Any]]:
    """Run a program whose `events` writes to the pipe, and `request` is what it was asked."""
    head = "import json, os, sys, time\nrequest = json.load(open(sys.argv[1]))\nevents = int(sys.argv[2])\n"
    (tmp_path / "program.py").write_text(head + program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    steps: list[Any] = []
    result = run_measurement(
        "program", {"wanted": 3}, on_step=lambda *step: steps.append(step), log=tmp_path / "log", **options
    )
    return result, steps


def event(text: str) -> str:
    return f"os.write(events, b'{text}')\n"


def test_steps_and_the_result_come_back_and_what_libraries_print_goes_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print('vLLM says something')\n" + event('{"progress": 0.5, "text": "half"}\\n')
    program += "os.write(events, (json.dumps({'result': request}) + chr(10)).encode())\n"
    assert run(tmp_path, program, monkeypatch) == ({"wanted": 3}, [(0.5, "half")])
    assert (tmp_path / "log").read_text() == "vLLM says something\n"


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (3, UnsupportedError)])
def test_a_refusal_is_raised_as_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[MoeOptimizerError]
) -> None:
    program = event(f'{{"refused": "too little memory", "hint": "h", "exit_code": {code}}}\\n') + f"sys.exit({code})"
    with pytest.raises(kind, match="too little memory") as caught:
        run(tmp_path, program, monkeypatch)
    assert caught.value.hint == "h"


def test_a_process_that_dies_in_the_middle_of_an_event_leaves_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = event('{"result": [') + "sys.exit('an illegal memory access')"
    with pytest.raises(MeasurementError, match=r"exit 1:.*illegal memory"):
        run(tmp_path, program, monkeypatch)


def test_a_process_that_the_system_ends_is_said_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import signal\nprint('multiplying', flush=True)\nos.kill(os.getpid(), signal.SIGILL)\n"
    with pytest.raises(MeasurementError, match=r"signal SIGILL: multiplying"):
        run(tmp_path, program, monkeypatch)


def test_a_process_that_hangs_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """import subprocess
child = subprocess.Popen(["sleep", "600"])
with open("new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("new", "pids")
time.sleep(600)
"""

    class OnceItHangs(threading.Timer):
        """Its time is over when the process has come that far, however long a busy machine takes."""

        def run(self) -> None:
            eventually((tmp_path / "pids").is_file)
            self.function()

    monkeypatch.setattr("threading.Timer", OnceItHangs)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeasurementError, match="after 2 s"):
        run(tmp_path, program, monkeypatch, timeout_s=2.0)
    process, child = map(int, (tmp_path / "pids").read_text().split())
    assert not is_running(process)
    eventually(lambda: not is_running(child), "its child runs on")
