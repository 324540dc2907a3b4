"""Plans and serves with the embedded engine: `--engine embedded`, or `--engine auto` where vLLM cannot run."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.cli import INTERRUPTED, messages
from moe_optimizer.errors import ExitCode, InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.cli.progress import ProgressLines
    from moe_optimizer.cli.settings import Settings
    from moe_optimizer.launcher.run_folder import RunFolder
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.plan_context.request import PlanRequest

ENGINE = "embedded"


def with_engine(request: PlanRequest) -> tuple[PlanRequest, tuple[str, ...]]:
    """Return the request with "auto" decided, and what to warn of; no pass is wished for the embedded engine.

    Raises:
        InputError: an optimization of vLLM is asked of the embedded engine.
        UnsupportedError: so is code that comes with the model.
    """
    from moe_optimizer.passes.registry import PASS_NAMES
    from moe_optimizer.plan.decision import Wish

    origin, warnings = "--engine embedded", ()
    if request.engine == "auto":
        why_not = _why_not_vllm(request)
        if not why_not:
            return dataclasses.replace(request, engine="vllm"), ()
        origin = "--engine auto"
        warnings = (f"--engine auto: the embedded engine serves, because {why_not}",)
    elif request.engine != ENGINE:
        return request, ()
    asked = [said_by for wish, said_by in request.wishes.values() if wish is Wish.ON and said_by.startswith("flag ")]
    if asked or request.required:
        said = asked[0].removeprefix("flag ") if asked else f"--require {min(request.required)}"
        raise InputError(
            f"{said}: an optimization of vLLM, and the embedded engine serves ({origin})",
            hint="docs/engine.md lists what the embedded engine switches; its arguments go after --",
        )
    if request.trust_remote_code:
        raise UnsupportedError("--trust-remote-code: the embedded engine runs no code that comes with a model")
    off = dict.fromkeys([*PASS_NAMES, "parallelism.expert_parallel"], (Wish.OFF, origin))
    software = dataclasses.replace(request.software, vllm=None)
    return dataclasses.replace(request, engine=ENGINE, wishes=off, software=software), warnings


def _why_not_vllm(request: PlanRequest) -> str:
    """Return why vLLM cannot serve here, "" where it can."""
    vllm = request.software.vllm
    if vllm is None:
        return "vLLM is not installed"
    if vllm.device == "cuda" and request.hardware.gpu is None:
        return f"vLLM {vllm.version} is built for CUDA and there is no GPU"
    return ""


def check_can_serve_here(plan: Plan, settings: Settings) -> None:
    """Refuse what is known to fail before the model is loaded.

    Raises:
        InputError: the plan is for another machine, or weights are missing.
        UnsupportedError: a package is missing.
    """
    from moe_optimizer.cli.engine_checks import missing_packages
    from moe_optimizer.cli.preflight import check_same_hardware, check_weights

    if plan.hardware.origin == "named":
        check_same_hardware(plan, settings)
    absent = missing_packages()
    if absent:
        raise UnsupportedError(
            f"--engine embedded: not installed: {', '.join(absent)}", hint="run: pip install 'moe-optimizer[engine]'"
        )
    check_weights(plan)


def read_arguments(plan: Plan) -> dict[str, Any]:
    """Return what the engine's server is started with.

    Raises:
        InputError: an argument after -- is none of the engine's, or has a wrong value.
    """
    from moe_optimizer.cli.engine_server import read_command_line

    # Of a hub id the path may be its snapshot in the cache.
    named = plan.model.name if "/" in plan.model.name else plan.model.path
    return read_command_line(["--model", plan.model.path, "--served-model-name", named, *plan.serve_args.words])


def check_arguments(plan: Plan) -> None:
    """Read the arguments, if the engine's packages are here. Takes seconds: it imports torch.

    Raises:
        InputError: see `read_arguments`.
    """
    from moe_optimizer.cli.engine_checks import missing_packages

    if not missing_packages():
        read_arguments(plan)


def serve(plan: Plan, *, run_dir: Path, progress: ProgressLines, as_json: bool) -> int:
    """Serve `plan` in this process until SIGINT or SIGTERM; requests under way may finish.

    Raises:
        MoeOptimizerError: the model cannot be loaded, or the address or the folder cannot be used.
    """
    from moe_optimizer.engine.server.serve import serve as serve_engine
    from moe_optimizer.launcher.address import reserved, server_address
    from moe_optimizer.launcher.run_folder import RunFolder

    started, ready, folder = time.monotonic(), False, RunFolder(run_dir)

    def on_ready() -> None:
        nonlocal ready
        ready = True
        _report(plan, folder, named, time.monotonic() - started, progress, as_json=as_json)

    arguments = read_arguments(plan)
    named = arguments["served_model_name"]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with reserved([server_address(plan.serve_args)]), folder.locked():
            folder.prepare(plan)
            progress.warn(plan.warnings)
            progress.line(f"loading {plan.model.name} into the embedded engine")
            serve_engine(**arguments, on_ready=on_ready)
    except KeyboardInterrupt:
        return ExitCode.OK if ready else INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return ExitCode.OK


def _report(
    plan: Plan, folder: RunFolder, named: str, start_up_s: float, progress: ProgressLines, *, as_json: bool
) -> None:
    import sys

    from moe_optimizer.cli.ready_server import ReadyServer
    from moe_optimizer.launcher.address import base_url, server_address

    url = base_url(*server_address(plan.serve_args))
    progress.line(f"ready after {start_up_s:.1f} s: {url}, model {named} (embedded engine)")
    progress.release()
    if not as_json:
        return
    info = ReadyServer(
        base_url=url,
        model=named,
        pid=os.getpid(),
        run_dir=str(folder.path),
        log="",
        plan_digest=plan.digest,
        start_up_s=start_up_s,
        phases_s={},
        stock_start=None,
        warm_up="no",
        servers=(),
        passes=(),
        restarts=0,
    )
    messages.write_data(messages.as_json_text(info))
    sys.stdout.flush()
