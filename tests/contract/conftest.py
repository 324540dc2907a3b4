"""Running the real command the way a user does, and looking at everything it leaves behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_OPTIMIZER = (str(ROOT / "run_optimizer.py"),)
MOE_OPTIMIZER = ("-m", "moe_optimizer")
_MARK = "MOE_TEST_MARK"
_MAX_BYTES = 1 << 30
_MAX_CPU_S = 60
"""For what never ends. Processor time grows too where others share cores and caches: a refusal by the embedded engine,
which imports torch, took 9.3 s beside thirteen other processes on two cores."""


@dataclass(frozen=True)
class Finished:
    """A command that has ended, with all that was seen of it."""

    code: int
    stdout: str
    stderr: str
    left_running: tuple[int, ...]
    """Processes it started that outlived it (ended by now)."""

    @property
    def first_line(self) -> str:
        """The first line of stderr."""
        return self.stderr.partition("\n")[0]

    @property
    def hints(self) -> list[str]:
        """Every hint line of stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("hint: ")]


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Finished]:
    """The function `run`: a fixture, because test modules cannot import each other."""
    return run


NOT_MEASURED = {"MOE_OPTIMIZER_CALIBRATE": "0"}
"""Twenty seconds before each server would be in the way."""
VLLM_CACHE = {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm")}
"""vLLM keeps its own cache, unless the tests give it another (tests/vllm/conftest.py)."""


def clean_environment() -> dict[str, str]:
    """This process's environment without the package's own variables, colours off, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOE_OPTIMIZER_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "80", "PYTHONPATH": path}


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    program: Sequence[str] = RUN_OPTIMIZER,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    interrupt_when: Callable[[list[int]], bool] | None = None,
    bounded: bool = True,
    timeout_s: float = 300.0,
) -> Finished:
    """Run `python PROGRAM ARGUMENTS` in `cwd` to its end and report what happened.

    The package's own two programs run in a fork of a process that has imported them, where nothing speaks against it.

    Every descendant inherits a mark in its environment, so that one which outlives the command is found even
    when it has moved to a session of its own.

    Args:
        fresh: start Python also for them. Of each kind of answer one test does.
        interrupt_when: asked about ten times a second with the ids of all running descendants; once it says yes,
            the command gets SIGINT.
        bounded: hold the command and each of its descendants to 1 GiB of address space and 60 s of processor time;
            one that goes over is ended by the kernel. (Processor time, so that a busy machine fails no test; the
            peak resident size that wait4 reports includes this process's own from before the exec.)
        timeout_s: end everything after this time; what still ran then is reported as left running.
    """
    mark = uuid.uuid4().hex
    environment = {**VLLM_CACHE, **clean_environment(), **NOT_MEASURED, **(env or {}), _MARK: mark}
    if program in (RUN_OPTIMIZER, MOE_OPTIMIZER) and bounded and interrupt_when is None and not fresh:
        code, stdout, stderr = _run_in_a_fork(program, arguments, cwd, environment, timeout_s)
        return Finished(code, stdout, stderr, tuple(_kill_marked(mark)))
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=cwd, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    if bounded:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    deadline = time.monotonic() + timeout_s
    while interrupt_when is not None and process.poll() is None and time.monotonic() < deadline:
        if interrupt_when(_marked(mark)):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.1)
    try:
        stdout, stderr = process.communicate(timeout=deadline - time.monotonic())
        left = _kill_marked(mark)
    except subprocess.TimeoutExpired:
        left = _kill_marked(mark)
        stdout, stderr = process.communicate()
    return Finished(process.returncode, stdout, stderr, tuple(left))


@functools.cache
def _forks() -> tuple[subprocess.Popen[str], int]:
    """Return the process that forks, and where its answers can be read."""
    answers, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.command_forks", str(theirs)],
        cwd=ROOT, env=clean_environment(), pass_fds=[theirs], text=True, bufsize=1,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    atexit.register(process.kill)
    return process, answers


def _run_in_a_fork(
    program: Sequence[str], arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    process, answers = _forks()
    assert process.stdin is not None
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        request = {
            "program": program, "arguments": arguments, "cwd": str(cwd), "env": environment,
            "streams": [stdout.name, stderr.name],
            "limits": {"bytes": _MAX_BYTES, "cpu_seconds": _MAX_CPU_S, "seconds": round(timeout_s)},
        }  # fmt: skip
        process.stdin.write(json.dumps(request) + "\n")
        code = os.read(answers, 16)
        assert code, "the process that forks has ended"
        return int(code), stdout.read().decode(errors="replace"), stderr.read().decode(errors="replace")


def _kill_marked(mark: str) -> list[int]:
    pids = _marked(mark)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _marked(mark: str) -> list[int]:
    """Ids of running processes that carry the mark."""
    needle = f"{_MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:
                continue  # it ended, or belongs to somebody else
    return pids
