"""Runs the serve command on the bundled model for the length of a block, as a user does."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-moe"
_STOP_TIMEOUT_S = 180.0
_CACHE = Path(tempfile.gettempdir()) / f"moe-optimizer-soak-{os.getpid()}"
"""Of all servers of this process, removed at its end."""
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


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
    # What others measure and compile on this machine meanwhile is not looked at.
    environment = {**os.environ, "XDG_CACHE_HOME": str(_CACHE)}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
    )


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
