"""Starts a server in a session of its own, and stops it with every process that it started."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from moe_optimizer import env
from moe_optimizer.server_processes import kill_members, members_of

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_KILL_WAIT_S = 30.0
"""Chosen: a killed process first returns its memory, which takes seconds on a busy machine."""
_POLL_S = 0.1


class ServerProcess:
    """A running `vllm serve`, or the router before several.

    Args:
        command: argument list, no shell.
        environment: complete; its MOE_OPTIMIZER_PLAN names this server's own plan file.
        log_path: where stdout and stderr go.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self._marker = environment[env.PLAN]
        self._asked_to_stop = False
        log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C at the terminal reaches the launcher only, which then drains the server.
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also the id of its session."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the API server's exit status (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the API server, once: a second one would end it in the middle of its requests.

        It finishes its requests and then stops the engine and the workers, which get no signal of their own.
        """
        if self._asked_to_stop or self.poll() is not None:
            return
        self._asked_to_stop = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self, *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask it to stop, wait up to `grace_s` seconds or until `hurry` returns True, then kill what is left."""
        self.ask_to_stop()
        deadline = time.monotonic() + grace_s
        # A signal may end the wait: nothing is left then either.
        try:
            while self.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(_POLL_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill every process of this server and wait until they are gone."""
        kill_members(self.pid, self._marker)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_WAIT_S)

    def members(self) -> list[psutil.Process]:
        """Return the living processes of this server, zombies left out."""
        return members_of(self.pid, self._marker)

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of the log, at most `count`, without colours."""
        try:
            with self.log_path.open("rb") as stream:
                stream.seek(0, os.SEEK_END)
                stream.seek(max(0, stream.tell() - 400 * count))
                text = stream.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in _COLOR.sub("", text).splitlines() if line.strip()][-count:]
