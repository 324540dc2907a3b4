"""Runs the serve command on the bundled model for the length of a block, as a user does."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-moe"
_STOP_TIMEOUT_S = 180.0


@dataclass(slots=True)
class ServedRun:
    """A running serve command whose server is ready."""

    launcher: subprocess.Popen[str]
    ready: dict[str, Any]
    """What it printed then."""
    code: int | None = None
    """Its exit code, once it was stopped."""

    def processes(self) -> list[psutil.Process]:
        """Return the launcher and every process below it."""
        launcher = psutil.Process(self.launcher.pid)
        return [launcher, *launcher.children(recursive=True)]


def launched(run_dir: Path, port: int, said: TextIO, *arguments: str) -> subprocess.Popen[str]:
    """Start the command that serves the bundled model; the arguments are those of `served`."""
    command = [sys.executable, str(ROOT / "run_optimizer.py"), "--model", str(MODEL), "--port", str(port)]
    command += ["--run-dir", str(run_dir), "--enable-flash-dmoe", "--calibrate", "0", "--json", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True)


def a_free_port() -> int:
    """Return a port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def served(run_dir: Path, port: int, said: TextIO, *arguments: str) -> Iterator[ServedRun]:
    """Serve the bundled model; stop it at the end of the block as Ctrl-C does.

    Args:
        run_dir: its run folder.
        port: where it listens.
        said: takes what it says on stderr.
        arguments: more of the command's.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    launcher = launched(run_dir, port, said, *arguments)
    try:
        run = ServedRun(launcher, _ready(launcher))
        yield run
        launcher.send_signal(signal.SIGINT)
        run.code = launcher.wait(_STOP_TIMEOUT_S)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(_STOP_TIMEOUT_S)
        assert launcher.stdout is not None
        launcher.stdout.close()


def _ready(launcher: subprocess.Popen[str]) -> dict[str, Any]:
    assert launcher.stdout is not None
    printed = ""
    for line in launcher.stdout:
        printed += line
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(printed)
    raise RuntimeError(f"the server was not ready: exit code {launcher.wait(_STOP_TIMEOUT_S)}")
