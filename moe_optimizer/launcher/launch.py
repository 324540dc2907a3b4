"""Serves a plan: starts vLLM, waits for the proofs, and stops it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.launcher.stop_signals import StopRequestedError, collected_stops
from moe_optimizer.launcher.supervisor import Supervisor
from moe_optimizer.plan.plan import Plan

__all__ = ["ServerInfo", "StopRequestedError", "check", "running", "serving"]


def check(plan: Plan, *, run_dir: Path) -> None:
    """Refuse, before anything is started, what is known to fail; leave nothing behind.

    Raises:
        InputError, UnsupportedError: an address is taken, the folder is in use or cannot be written, or something
            that is needed is missing.
    """
    folder = RunFolder(run_dir)
    Deployment(plan, folder).check()
    folder.check()


@contextlib.contextmanager
def serving(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    strict: bool = False,
    ready_timeout_s: float = 600.0,
    warm_up_s: float = 0.0,
    stall_timeout_s: float = 0.0,
    on_loading: Callable[[], None] | None = None,
    echo: Callable[[str], None] | None = None,
    verbose: bool = False,
) -> Iterator[Supervisor]:
    """Serve `plan` while the block lasts, which begins when it is ready; then let the servers finish their requests.

    SIGINT and SIGTERM end the wait for it and `Supervisor.watch`; a second one stops the servers at once. None of their
    processes is left at the end, however the block ends.

    Args:
        plan, run_dir, require, strict, warm_up_s, stall_timeout_s, on_loading, echo, verbose: see `Supervisor`.
        ready_timeout_s: how long everything may take to answer.

    Raises:
        StopRequestedError: a signal came.
        InputError, UnsupportedError: nothing can be started like this, or vLLM refuses its arguments.
        RequiredNotAppliedError: a required pass did not run.
        ServerFailedError: a server or the router died, or was not ready in time; the message has its last lines.
    """
    run = Supervisor(
        plan, run_dir, require=require, strict=strict, warm_up_s=warm_up_s, stall_timeout_s=stall_timeout_s,
        on_loading=on_loading, echo=echo, verbose=verbose,
    )  # fmt: skip
    with collected_stops() as stops, run.started(stops):
        run.wait_until_ready(ready_timeout_s)
        yield run


@contextlib.contextmanager
def running(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    ready_timeout_s: float = 600.0,
    warm_up_s: float = 0.0,
) -> Iterator[ServerInfo]:
    """Serve `plan` while the block lasts, quietly and without a look at signals. For tests and benchmarks.

    Raises: as `serving`.
    """
    run = Supervisor(plan, run_dir, require=require, warm_up_s=warm_up_s)
    with run.started():
        yield run.wait_until_ready(ready_timeout_s)
