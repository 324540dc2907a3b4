"""Whenever a signal comes, the process of a block does not outlive it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer import child_process as module
from moe_optimizer.child_process import child_process
from moe_optimizer.cli.termination import clean_termination
from tests.eventually import eventually, is_running

pytestmark = pytest.mark.usefixtures("heeded_signals")

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


class Recorded(subprocess.Popen[Any]):
    """Keeps every process that was started."""

    started: list[subprocess.Popen[Any]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.started.append(self)


@pytest.fixture
def popen(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """The class that starts processes, for a test to change; a list of its own for each."""
    own = type("Own", (Recorded,), {"started": []})
    monkeypatch.setattr(module.subprocess, "Popen", own)
    return own


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def run(seconds: float = 10.0, command: list[str] = SLEEPS, **options: Any) -> None:
    with child_process(command, grace_s=seconds, **options) as process:
        process.wait()


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_a_signal_while_the_process_is_being_started_leaves_none(
    popen: type[Recorded], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, raised: type[BaseException]
) -> None:
    def started_and_interrupted(self: Recorded, *arguments: Any, **options: Any) -> None:
        Recorded.__init__(self, *arguments, **options)
        signal.raise_signal(number)

    before = handlers()
    monkeypatch.setattr(popen, "__init__", started_and_interrupted)
    with clean_termination(), pytest.raises(raised):
        run()
    (process,) = popen.started
    assert process.returncode == -signal.SIGTERM
    assert handlers() == before


def test_a_process_that_cannot_be_started_leaves_the_handlers(tmp_path: Path) -> None:
    before = handlers()
    with pytest.raises(FileNotFoundError):
        run(command=[str(tmp_path / "none")])
    assert handlers() == before


def test_a_process_that_does_not_listen_is_killed(popen: type[Recorded]) -> None:
    with child_process([sys.executable, "-c", DEAF], grace_s=0.2, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "deaf\n"
    assert process.returncode == -signal.SIGKILL


def test_a_second_signal_while_it_is_ended_kills_it(popen: type[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([KeyboardInterrupt, KeyboardInterrupt])
    wait = subprocess.Popen.wait

    def interrupted(self: Recorded, timeout: float | None = None) -> int:
        for error in waits:
            raise error
        return wait(self, timeout)

    monkeypatch.setattr(popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(seconds=600.0)
    (process,) = popen.started
    assert process.returncode in (-signal.SIGTERM, -signal.SIGKILL)


def test_the_children_of_the_process_end_with_it(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait"
    with child_process(["sh", "-c", script], grace_s=10.0):
        pid = eventually(lambda: (tmp_path / "pid").is_file() and int((tmp_path / "pid").read_text()))
    assert eventually(lambda: not is_running(pid))


def test_one_that_ended_by_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "killpg", lambda *_: pytest.fail("a group that is gone may be somebody else's"))
    with child_process([sys.executable, "-c", ""], grace_s=1.0) as process:
        assert process.wait() == 0


def test_in_a_thread_no_handler_is_touched() -> None:
    codes: list[int] = []

    def work() -> None:
        with child_process([sys.executable, "-c", ""], grace_s=1.0) as process:
            codes.append(process.wait())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]
