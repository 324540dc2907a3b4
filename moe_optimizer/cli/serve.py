"""Runs `moe-optimizer serve`: plans, starts vLLM with the plugin and proves what runs."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.cli import INTERRUPTED, embedded, messages
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.options import DEFAULT_READY_TIMEOUT_S, DEFAULT_STALL_TIMEOUT_S, ServeOptions
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.env import read_environment
from moe_optimizer.errors import ExitCode, InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.plan.plan import Plan


@takes(ServeOptions)
def command(options: ServeOptions) -> messages.Output | int:
    """Serve a model through vLLM with the optimizations that fit.

    Shows which optimizations really run, and fails if a required one does not. Arguments after -- go to
    vllm serve. Flags override the environment, then come the profile and the defaults.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.plan import plan_output
    from moe_optimizer.cli.preflight import check_can_serve_here
    from moe_optimizer.cli.speed_questions import measure_if_needed
    from moe_optimizer.launcher import launch

    if options.plan is not None:
        return _serve_file(options)
    if options.dry_run:
        return plan_output(planning.make(options), as_json=options.json)
    lines = ProgressLines(verbose=options.verbose)
    with messages.held_messages(verbose=options.verbose, then=lines.warn):
        settings, request = planning.read_request(options)
        run_dir = _run_dir(options, request.model.name)
        if request.engine == embedded.ENGINE:
            if options.restart:
                raise UnsupportedError("--restart: the embedded engine serves in this process, which ends with it")
            plan = planning.decide(settings, request)
            embedded.check_can_serve_here(plan, settings)
            return embedded.serve(plan, run_dir=run_dir, progress=lines, as_json=options.json)
        if not settings.disabled:
            # Measured after every check that could refuse the start.
            plan = planning.decide_before_measuring(request)
            check_can_serve_here(plan, settings)
            launch.check(plan, run_dir=run_dir)
            measure_if_needed(plan, settings["calibrate"], lines)
            request = planning.after_measuring(request)
        plan = planning.decide(settings, request)
        check_can_serve_here(plan, settings)
        launch.check(plan, run_dir=run_dir)
    return _serve(options, plan, run_dir, lines)


def _serve_file(options: ServeOptions) -> messages.Output | int:
    """Serve the plan of a file as it is.

    Raises:
        InputError: an option before `--plan` wants something else planned, or the file is no plan.
        UnsupportedError: it is for another machine or vLLM.
    """
    from moe_optimizer.cli.plan import plan_output
    from moe_optimizer.cli.planned_file import read_plan
    from moe_optimizer.launcher import launch

    lines = ProgressLines(verbose=options.verbose)
    with messages.held_messages(verbose=options.verbose, then=lines.warn):
        plan = read_plan(options)
        if options.dry_run:
            return plan_output(plan, as_json=options.json)
        run_dir = _run_dir(options, plan.model.name)
        launch.check(plan, run_dir=run_dir)
    return _serve(options, plan, run_dir, lines)


def _serve(options: ServeOptions, plan: Plan, run_dir: Path, lines: ProgressLines) -> int:
    """Serve until a signal comes or a server ends; return the exit code."""
    from moe_optimizer.cli.ready_server import ready_server
    from moe_optimizer.launcher import decode_check, launch
    from moe_optimizer.launcher.warm_up import DEFAULT_LIMIT_S

    lines.warn(plan.warnings)
    # Nothing of ours refuses the start any more. What fails from here on stands after these lines, at the end.
    lines.release()
    ready, ours = False, not read_environment().disabled

    def on_ready(info: launch.ServerInfo) -> None:
        nonlocal ready
        ready = True
        if options.json:
            messages.write_data(messages.as_json_text(ready_server(plan, info)))
            sys.stdout.flush()

    with contextlib.suppress(launch.StopRequestedError):
        launch.serve(
            plan,
            run_dir=run_dir,
            on_ready=on_ready,
            restarts=options.restart,
            strict=options.strict,
            ready_timeout_s=DEFAULT_READY_TIMEOUT_S if options.ready_timeout is None else options.ready_timeout,
            warm_up_s=DEFAULT_LIMIT_S if ours and not options.no_warm_up else 0.0,
            decode_check_s=decode_check.DEFAULT_LIMIT_S if ours and not options.no_decode_check else 0.0,
            stall_timeout_s=DEFAULT_STALL_TIMEOUT_S if options.stall_timeout is None else options.stall_timeout,
            echo=lines.line,
            live=lines.live if messages.use_color(sys.stderr) and not options.verbose else None,
            verbose=options.verbose,
        )
    if ready:
        return ExitCode.OK
    # Stopped before it was ready: that is an interrupt, not the end of a run.
    lines.line("interrupted")
    return INTERRUPTED


def _run_dir(options: ServeOptions, model_name: str) -> Path:
    """Return the given folder, or a new one named after model, time and process."""
    if options.run_dir == "":
        raise InputError("--run-dir: got '', expected a folder")
    given = Path(options.run_dir) if options.run_dir else read_environment().run_dir
    if given is not None:
        return given
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model_name).name).strip("-.") or "model"
    return Path("runs") / f"{name[:60]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
