"""Runs a child process for the length of a block and ends it with the block, also if a signal ends the block."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

# SIGINT last: its handler is restored first, and the handlers of the others belong to a block around this one.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def python_command(*words: str) -> list[str]:
    """Return the command line of this Python that imports nothing from the folder it is started in.

    `python -m` looks there first: a torch.py or yaml.py that lies in the user's folder would be executed.
    """
    return [sys.executable, "-P", *words]


def python_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which no Python, children of children included, imports from the folder it starts in.

    Args:
        environ: what it is made of; default: this process's.
    """
    kept = dict(os.environ if environ is None else environ)
    # An empty entry is the current folder, and is what PYTHONPATH=$PYTHONPATH:/x leaves where it was not set.
    folders = [folder for folder in kept.pop("PYTHONPATH", "").split(os.pathsep) if folder]
    paths = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**kept, **paths, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def child_process(command: Sequence[str], *, grace_s: float, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a command for the length of the block; at its end, end the command's process group if it still runs.

    The command has a session of its own, so that Ctrl-C reaches only this process.

    Args:
        command: argument list, no shell.
        grace_s: seconds between SIGTERM and SIGKILL.
        options: of subprocess.Popen.
    """
    process = None
    try:
        with _signals_held():
            process = subprocess.Popen(list(command), start_new_session=True, **options)
        yield process
    finally:
        if process is not None:
            _end(process, grace_s)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delay signals to the end of the block: an exception while a process starts would leave it running."""
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    # Handlers run in the main thread only: other threads are not interrupted.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS if in_main_thread}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number in handled:
            signal.signal(number, hold)
        yield
    finally:
        for number in reversed(handled):
            signal.signal(number, handled[number])
    for number in held:
        signal.raise_signal(number)


def _end(process: subprocess.Popen[Any], grace_s: float) -> None:
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # A second signal ends the waiting and comes here too.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
