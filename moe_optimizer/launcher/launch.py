"""Serves a plan: starts vLLM, waits for the proofs, and stops it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.served import Served
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.launcher.stop_signals import StopRequestedError, collected_stops
from moe_optimizer.launcher.supervisor import Supervisor
from moe_optimizer.plan.plan import Plan

__all__ = ["ServerInfo", "StopRequestedError", "check", "running", "serve"]

BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 60.0
"""Chosen: before the first restart, doubled with each; a driver that resets its GPU takes some seconds."""
_POLL_S = 0.2


def check(plan: Plan, *, run_dir: Path) -> None:
    """Refuse, before anything is started, what is known to fail; leave nothing behind.

    Raises:
        InputError, UnsupportedError: an address is taken, the folder is in use or cannot be written, or something
            that is needed is missing.
    """
    folder = RunFolder(run_dir)
    Deployment(plan, folder).check()
    folder.check()


def serve(
    plan: Plan,
    *,
    run_dir: Path,
    on_ready: Callable[[ServerInfo], None],
    restarts: int = 0,
    require: frozenset[str] = frozenset(),
    strict: bool = False,
    ready_timeout_s: float = 600.0,
    warm_up_s: float = 0.0,
    decode_check_s: float = 0.0,
    stall_timeout_s: float = 0.0,
    echo: Callable[[str], None] | None = None,
    live: Callable[[str], None] | None = None,
    verbose: bool = False,
) -> NoReturn:
    """Serve `plan` until a stop is requested or something fails; then let the servers finish their requests.

    Of SIGINT, SIGTERM and SIGHUP a second one stops the servers at once. None of their processes is left at the end,
    however it comes.

    Args:
        plan, run_dir, require, strict, warm_up_s, decode_check_s, stall_timeout_s, echo, live, verbose: see
            `Supervisor`.
        on_ready: called each time everything is ready.
        restarts: how often the servers are started again when they end or hang after they were ready.
        ready_timeout_s: how long everything may take to answer.

    Raises:
        StopRequestedError: a signal came.
        InputError, UnsupportedError: nothing can be started like this, or vLLM refuses its arguments.
        RequiredNotAppliedError: a required pass did not run, or the decode check found our kernels wrong.
        ServerFailedError: a server or the router died, or was not ready in time; the message has its last lines.
    """
    served, say = Served(), echo or (lambda _line: None)
    with collected_stops() as stops, served.summed_up(say):
        while True:
            run = Supervisor(
                plan, run_dir, served=served, require=require, strict=strict, warm_up_s=warm_up_s,
                decode_check_s=decode_check_s, stall_timeout_s=stall_timeout_s, echo=echo, live=live, verbose=verbose,
            )  # fmt: skip
            try:
                with run.started(stops):
                    on_ready(run.wait_until_ready(ready_timeout_s))
                    run.watch()
            except ServerFailedError as error:
                # What never was ready would hardly be so the next time.
                if served.restarts >= restarts or not served.begun or stops:
                    raise
                served.restarts += 1
                wait_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (served.restarts - 1))
                reason = str(error).partition("\n")[0]
                say(f"warning: {reason}; restart {served.restarts} of {restarts} in {wait_s:g} s")
            _back_off(wait_s, stops)


def _back_off(seconds: float, stops: Sequence[int]) -> None:
    deadline = time.monotonic() + seconds
    while not stops and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if stops:
        raise StopRequestedError


@contextlib.contextmanager
def running(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    ready_timeout_s: float = 600.0,
    warm_up_s: float = 0.0,
    decode_check_s: float = 0.0,
    echo: Callable[[str], None] | None = None,
) -> Iterator[ServerInfo]:
    """Serve `plan` while the block lasts, without a look at signals, and quietly but for what `echo` takes. For tests
    and benchmarks.

    Raises: as `serve`, but for StopRequestedError.
    """
    run = Supervisor(plan, run_dir, require=require, warm_up_s=warm_up_s, decode_check_s=decode_check_s, echo=echo)
    with run.started():
        yield run.wait_until_ready(ready_timeout_s)
