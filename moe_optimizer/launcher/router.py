"""Builds the command of the router before a group of servers: vllm-router, from the package index."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from moe_optimizer import env, supervised
from moe_optimizer.child_process import python_command, python_environment
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.lifeline import this_process
from moe_optimizer.plan.pass_params import DisaggregationParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments

_NIXL_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
_NOT_FOR_THE_ROUTER = ("OPENAI_API_KEY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def check_group_can_run(plan: Plan, environ: Mapping[str, str] | None = None) -> None:
    """Refuse a group of servers that is known not to come up or not to be safe here.

    Raises:
        UnsupportedError: a package is missing, or an API key is asked for.
    """
    if plan.group is None:
        return
    environ = os.environ if environ is None else environ
    if environ.get("VLLM_API_KEY"):
        raise UnsupportedError(
            "VLLM_API_KEY: vllm-router does not check API keys, so the servers behind it would answer anybody",
            hint="unset it, or serve one server",
        )
    if importlib.util.find_spec("vllm_router") is None:
        raise UnsupportedError(
            "several servers need vllm-router, which is not installed here", hint="run: pip install vllm-router"
        )
    missing = _missing_for_the_router()
    if missing:
        # It starts last: without this its error comes when every server is up.
        raise UnsupportedError(
            f"vllm-router needs {', '.join(missing)}, not installed here", hint=f"run: pip install {' '.join(missing)}"
        )
    split = plan.decision("disaggregation").params
    nixl = isinstance(split, DisaggregationParams) and split.connector == "NixlConnector"
    if nixl and not any(importlib.util.find_spec(name) for name in _NIXL_MODULES):
        raise UnsupportedError(
            "disaggregation on GPUs needs NIXL, which is not installed here", hint="run: pip install nixl"
        )


def _missing_for_the_router() -> list[str]:
    """Return the packages that vllm-router always needs and that are not installed."""
    try:
        needed = metadata.requires("vllm-router") or []
    except metadata.PackageNotFoundError:
        return []
    # What has a marker is for an extra, or for some machines.
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed if ";" not in line]
    return [name for name in names if not any(metadata.distributions(name=name))]


def router_command(router_args: ServeArguments) -> list[str]:
    """Return the argument list that starts the router."""
    return python_command("-m", supervised.__name__, "vllm_router.launch_router", *router_args.words)


def router_environment(plan_path: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the router's environment: this process's, with the plan by which its processes are found."""
    environ = os.environ if environ is None else environ
    # The router would send the key to every server, and reach servers on this machine through the proxy.
    kept = {name: value for name, value in environ.items() if name.upper() not in _NOT_FOR_THE_ROUTER}
    return {**python_environment(kept), env.PLAN: str(plan_path), env.LAUNCHER: this_process()}
