"""Ends a server whose launcher is gone: each of its processes watches the launcher, whatever else it is doing.

vLLM catches the signal that the kernel sends when a parent dies and starts serving all the same, so a server whose
launcher was killed during start-up would run with nobody to stop it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from moe_optimizer import env

_POLL_S = 1.0
_GRACE_S = 8.0
"""Chosen: for requests that are being answered; what is left then is killed, 15 s after the launcher at most."""

_watching = False


def this_process() -> str:
    """Return what MOE_OPTIMIZER_LAUNCHER is for the servers of this process."""
    return f"{os.getpid()} {_started_at(os.getpid())} {_pid_space()}"


def watch_launcher() -> None:
    """Watch the launcher from a thread, if the environment names one. Harmless when repeated."""
    global _watching  # noqa: PLW0603 - one watch for each process
    pid, started_at, pid_space = os.environ.get(env.LAUNCHER, "0 0 none").split(" ", 2)
    if _watching or pid_space != _pid_space():
        return  # a worker on another machine cannot see the launcher
    _watching = True

    def start() -> None:
        threading.Thread(target=_watch, args=(int(pid), started_at), name="launcher-watch", daemon=True).start()

    os.register_at_fork(after_in_child=start)  # threads are not inherited
    start()


def _watch(pid: int, started_at: str) -> None:
    grace_s = 0.0  # without a launcher from the first, nothing can be in the middle of an answer
    while _still_runs(pid, started_at):
        grace_s = _GRACE_S
        time.sleep(_POLL_S)
    _end_the_server(grace_s)


def _still_runs(pid: int, started_at: str) -> bool:
    try:
        return _started_at(pid) == started_at
    except OSError:
        return True  # a process without a free file descriptor cannot look; its launcher may live


def _end_the_server(grace_s: float) -> None:
    """End this process and all others of the server, in the end by force."""
    # psutil only here: watching must not delay or change a start.
    from moe_optimizer import server_processes

    session, plan_path = os.getsid(0), os.environ.get(env.PLAN, "")
    if session != os.getpid():
        time.sleep(grace_s)
        grace_s = 0.0
    # Another process does it: this one may end before the others, or start one more while it looks for them.
    command = [sys.executable, "-m", server_processes.__name__, str(session), plan_path, str(grace_s)]
    outside = {name: value for name, value in os.environ.items() if name != env.PLAN}
    try:
        subprocess.Popen(command, env=outside, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        server_processes.kill_members(session, plan_path, trackers_wait_s=0)
        os.kill(os.getpid(), signal.SIGKILL)
    if grace_s:
        os.kill(os.getpid(), signal.SIGTERM)


def _started_at(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot: a later one of the same pid differs. "": gone.

    Raises:
        OSError: it could not be found out.
    """
    try:
        # The name before the last bracket may hold anything; then come the state and 18 fields before the start.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _pid_space() -> str:
    """Return what tells whether two processes know each other by the same ids: the machine's boot, the namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
