"""Builds the command and the environment of a server process."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

from moe_optimizer import env, supervised
from moe_optimizer.child_process import python_command, python_environment
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.launcher.compile_caches import compile_caches
from moe_optimizer.lifeline import this_process
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "moe_optimizer"
_SUPERVISED = ("-m", supervised.__name__)
_UNSAFE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
_NO_AOT_FILES = {"VLLM_USE_AOT_COMPILE": "0"}
_NOT_FORKED = ("--numa-bind", "--mm-tensor-ipc")
"""Arguments with which vLLM cannot fork its processes, or refuses to."""


def server_command(plan: Plan, serve_args: ServeArguments) -> list[str]:
    """Return the argument list that starts a server with `serve_args`; no shell is involved.

    `vllm serve MODEL` where the distribution is called vllm. The CPU build's distribution is not, and its command
    line dies looking up its own version; there the server module behind it is started, which takes the same flags.
    """
    if _has_distribution("vllm"):
        start = python_command(*_SUPERVISED, "vllm.entrypoints.cli.main", "serve", plan.model.path)
    else:
        start = python_command(*_SUPERVISED, "vllm.entrypoints.openai.api_server", "--model", plan.model.path)
    draining = () if env.read_environment().disabled else ("--middleware", supervised.MIDDLEWARE)
    return [*start, *draining, *serve_args.words]


def server_environment(plan: Plan, plan_path: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the server's environment: this process's, the plan's variables, and where the plan is.

    Raises:
        InputError: a variable is set that would let anyone who reaches vLLM's internal sockets run code.
    """
    environ = os.environ if environ is None else environ
    if environ.get(_UNSAFE, "0") not in ("", "0"):
        raise InputError(
            f"environment: {_UNSAFE}: got {environ[_UNSAFE]!r:.80}, expected it unset: it lets pickled code in",
            hint=f"unset {_UNSAFE}",
        )
    # The plan holds the launcher's own settings; a profile would be a second, contradicting wish.
    dropped = {env.PROFILE, env.RUN_DIR, env.HARDWARE}
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return {
        "VLLM_NO_USAGE_STATS": "1",
        **compile_caches(plan, environ),
        **_quicker_start(plan),
        **python_environment(kept),
        **plan.serve_env,
        env.PLAN: str(plan_path),
        env.LAUNCHER: this_process(),
    }


def _quicker_start(plan: Plan) -> dict[str, str]:
    """Return the variables with which vLLM does not do a second time what has been done.

    On GPUs its engine and workers are forks of its API server, where they can be: otherwise each of them starts Python
    and imports vLLM anew, one after the other. The API server has not touched a GPU by then; where it has, vLLM sees
    that and does not fork.

    The CPU platform never does. Its compiled models are kept by Inductor alone: the file that vLLM (0.32) writes of
    them for the next start cannot be loaded there ("no attribute 'finalize_loading'"), so that it compiled and wrote at
    every start.
    """
    if env.read_environment().disabled:
        return {}
    if not plan.num_gpus:
        return _NO_AOT_FILES
    return {} if any(flag in plan.serve_args for flag in _NOT_FORKED) else _FORKED


def check_plugin_visible(plan: Plan) -> None:
    """Refuse to start a server that would not find the plugin that the plan needs.

    Raises:
        UnsupportedError: no installed distribution offers the entry point, or VLLM_PLUGINS leaves it out.
    """
    if not plan.plugin_decisions or env.read_environment().disabled:
        return
    names = ", ".join(decision.pass_name for decision in plan.plugin_decisions)
    if not any(entry.name == ENTRY_POINT for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        raise UnsupportedError(
            f"vLLM would not find the plugin that applies {names}: no entry point in {ENTRY_POINT_GROUP}",
            hint="install this package beside vLLM: pip install -e . (or make setup)",
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and ENTRY_POINT not in chosen.split(","):
        raise UnsupportedError(
            f"VLLM_PLUGINS: got {chosen!r:.80}, expected it to name {ENTRY_POINT}, which applies {names}",
            hint=f"unset VLLM_PLUGINS or add {ENTRY_POINT} to it",
        )


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
