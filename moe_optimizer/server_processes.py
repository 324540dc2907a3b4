"""Finds and kills the processes of one server: API server, engine, workers and what they started.

As a program it ends a server whose launcher is gone: `python -m moe_optimizer.server_processes SESSION PLAN SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

from moe_optimizer import env

_KILL_WAIT_S = 30.0
"""Chosen: a killed process first returns its memory, which takes seconds on a busy machine."""
_TRACKER_WAIT_S = 10.0
"""Chosen: a tracker ends in milliseconds once the others are gone; killed, it would leave shared memory."""
_POLL_S = 0.1


def members_of(session: int, plan_path: str) -> list[psutil.Process]:
    """Return the living processes of a server, without zombies and without this process.

    vLLM's engine and workers are found by their session, and by the plan in their environment, which they keep when
    they change their session or lose their parent.
    """
    return [process for process in psutil.process_iter() if _is_member(process, session, plan_path)]


def _is_member(process: psutil.Process, session: int, plan_path: str) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getsid(process.pid) == session or process.environ().get(env.PLAN) == plan_path
    except (psutil.Error, OSError):
        return False


def kill_members(session: int, plan_path: str, *, trackers_wait_s: float = _TRACKER_WAIT_S) -> None:
    """Kill every process of a server and wait until they are gone.

    Python's resource trackers get time to end by themselves, since they remove the shared memory of the others.

    Args:
        session: id of the API server, which leads the session.
        plan_path: what MOE_OPTIMIZER_PLAN is for this server.
        trackers_wait_s: how long they get. 0: they are left to themselves, for a member that goes on to end itself.
    """
    now = time.monotonic()
    deadline, trackers_end = now + _KILL_WAIT_S, now + trackers_wait_s
    while time.monotonic() < deadline:
        members = members_of(session, plan_path)
        trackers = [process for process in members if tracks_resources(process)]
        for process in members:
            if process in trackers and (not trackers_wait_s or time.monotonic() < trackers_end):
                continue
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        if not members or (not trackers_wait_s and len(trackers) == len(members)):
            break
        psutil.wait_procs(members, timeout=_POLL_S)


def tracks_resources(process: psutil.Process) -> bool:
    """Return whether it is the process that multiprocessing starts to clean up after the others."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def process_is_alive(pid: int) -> bool:
    """Return whether a process of this machine still runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def main(session: int, plan_path: str, grace_s: float) -> None:
    """Give the API server `grace_s` seconds to end by itself, then kill what is left."""
    deadline = time.monotonic() + grace_s
    while process_is_alive(session) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    kill_members(session, plan_path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
