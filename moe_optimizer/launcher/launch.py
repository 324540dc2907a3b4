"""Serves a plan: starts vLLM, waits for the proofs, and stops it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_optimizer.errors import ExitCode
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.launcher.stop_signals import StopRequestedError, StopSignals
from moe_optimizer.launcher.supervisor import Supervisor
from moe_optimizer.plan.plan import Plan

__all__ = ["ServerInfo", "check", "required_passes", "running", "serve"]


def serve(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    ready_timeout_s: float = 600.0,
    warm_up_s: float = 0.0,
    on_warm_up: Callable[[], None] | None = None,
    on_ready: Callable[[ServerInfo], None] | None = None,
    echo: Callable[[str], None] | None = None,
    verbose: bool = False,
) -> ExitCode:
    """Serve `plan` until SIGINT or SIGTERM, then let the servers finish their requests and stop them.

    A second signal stops them at once. None of their processes is left when this returns or raises.

    Args:
        plan: one server, or a group of servers with a router.
        run_dir: gets plan.json, server.log and proof/, a group's servers in a folder each; of this run alone.
        require: passes that must run, besides those that the plan requires.
        ready_timeout_s: how long everything may take to answer.
        warm_up_s: how long it may then be driven through the shapes of traffic before it counts as ready; 0: not.
        on_warm_up: called before that, when everything answers and the required passes run.
        on_ready: called once, in this thread, when it is.
        echo: takes the messages for the user, line by line; default: stderr.
        verbose: copy the logs to stderr as they grow.

    Returns:
        ExitCode.OK after a requested stop.

    Raises:
        InputError, UnsupportedError: nothing can be started like this, or vLLM refuses its arguments.
        RequiredNotAppliedError: a required pass did not run.
        ServerFailedError: a server or the router died, or was not ready in time; the message has its last lines.
    """
    required = require | required_passes(plan)
    run = Supervisor(plan, run_dir, required, echo or _to_stderr, warm_up_s=warm_up_s, on_warm_up=on_warm_up)
    with StopSignals() as signals, contextlib.suppress(StopRequestedError), run.started(signals, verbose=verbose):
        info = run.wait_until_ready(ready_timeout_s)
        if on_ready is not None:
            on_ready(info)
        run.watch()
    return ExitCode.OK


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
def running(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    ready_timeout_s: float = 600.0,
) -> Iterator[ServerInfo]:
    """Start what `plan` asks for, quietly, and stop it at the end of the block. For tests and benchmarks.

    Raises: as `serve`.
    """
    run = Supervisor(plan, run_dir, require | required_passes(plan), lambda _line: None)
    with run.started(None, verbose=False):
        yield run.wait_until_ready(ready_timeout_s)


def required_passes(plan: Plan) -> frozenset[str]:
    """Return the passes that the plan itself requires."""
    return frozenset(decision.pass_name for decision in plan.decisions if decision.required)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
