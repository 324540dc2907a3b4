"""Runs `moe-optimizer serve`: plans, starts vLLM with the plugin and proves what runs."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.cli import INTERRUPTED, embedded, messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import DEFAULT_READY_TIMEOUT_S, ServeOptions
from moe_optimizer.cli.preflight import check_can_serve_here
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.errors import ExitCode, InputError

if TYPE_CHECKING:
    from moe_optimizer.cli.settings import Settings
    from moe_optimizer.launcher.launch import ServerInfo
    from moe_optimizer.plan.plan import Plan

TAKES_VLLM_ARGS = ("serve", "plan", "tune")
"""Commands that accept arguments of `vllm serve` after `--`."""


@takes(ServeOptions)
def command(options: ServeOptions) -> int:
    """Serve a model through vLLM with the optimizations that fit.

    Shows which optimizations really run, and fails if a required one does not. Arguments after -- go to
    vllm serve. Flags override the environment, then come the profile and the defaults.
    """
    from moe_optimizer.cli import planning

    if options.show_config or options.dry_run:
        return _show(options)
    progress = ProgressLines(verbose=options.verbose)
    with messages.held_messages(verbose=options.verbose, then=progress.warn):
        planned = planning.make(options, measure=functools.partial(_measure, options, progress))
        if planned.plan.engine == embedded.ENGINE:
            embedded.check_can_serve_here(planned.plan)
        else:
            check_can_serve_here(planned.plan, planned.settings)
    if planned.plan.engine == embedded.ENGINE:
        run_dir = _run_dir(planned.plan, options)
        return embedded.serve(planned.plan, run_dir=run_dir, progress=progress, as_json=options.json)
    return _launch(planned.plan, options, progress, strict=planned.settings["strict"])


def _show(options: ServeOptions) -> int:
    """Print the settings or the plan that a server would be started with."""
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.show_config import shows_config

    with messages.held_messages(verbose=options.verbose):
        if shows_config(options):
            return ExitCode.OK
        planned = planning.make(options)
    planning.show_plan(planned.plan, as_json=options.json)
    return ExitCode.OK


def _measure(options: ServeOptions, progress: ProgressLines, plan: Plan, settings: Settings) -> bool:
    """Measure the kernels that the plan has no table for, after every check that could refuse the start."""
    from moe_optimizer.cli.speed_questions import measure_if_needed
    from moe_optimizer.launcher import launch

    check_can_serve_here(plan, settings)
    launch.check(plan, run_dir=_run_dir(plan, options))
    return measure_if_needed(plan, settings["calibrate"], progress)


def _launch(plan: Plan, options: ServeOptions, progress: ProgressLines, *, strict: bool) -> int:
    from moe_optimizer.launcher import launch
    from moe_optimizer.proof.shown import flag_decisions

    watcher = _Watcher(plan, progress, as_json=options.json)
    shown = (*plan.plugin_decisions, *flag_decisions(plan)) if strict else ()
    code = launch.serve(
        plan,
        run_dir=_run_dir(plan, options),
        require=frozenset(decision.pass_name for decision in shown),
        ready_timeout_s=DEFAULT_READY_TIMEOUT_S if options.ready_timeout is None else options.ready_timeout,
        on_ready=watcher.on_ready,
        echo=watcher.echo,
        verbose=options.verbose,
    )
    # Stopped before it was ready: that is an interrupt, not the end of a run.
    return code if watcher.ready else INTERRUPTED


class _Watcher:
    """Writes the launcher's messages to stderr, and with --json the ready server to stdout."""

    def __init__(self, plan: Plan, progress: ProgressLines, *, as_json: bool) -> None:
        self.ready = False
        self._plan = plan
        self._progress = progress
        self._as_json = as_json
        self._warnings = plan.warnings

    def echo(self, line: str) -> None:
        """Pass one message on. The plan's warnings precede the first one."""
        self._progress.warn(self._warnings)
        self._warnings = ()
        self._progress.line(line)

    def on_ready(self, info: ServerInfo) -> None:
        """Record that the server is ready, and describe it on stdout with --json."""
        self.ready = True
        self._progress.release()
        if self._as_json:
            from moe_optimizer.cli.ready_server import ready_server

            messages.write_result(ready_server(self._plan, info), as_json=True, render=str)
            sys.stdout.flush()


def _run_dir(plan: Plan, options: ServeOptions) -> Path:
    """Return the given folder, or a new one named after model, time and process."""
    import re
    import time

    from moe_optimizer.env import read_environment

    if options.run_dir == "":
        raise InputError("--run-dir: got '', expected a folder")
    given = Path(options.run_dir) if options.run_dir else read_environment().run_dir
    if given is not None:
        return given
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(plan.model.name).name).strip("-.") or "model"
    return Path("runs") / f"{name[:60]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
