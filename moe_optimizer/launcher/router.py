"""Builds the command of the router before a group of servers: vllm-router, from the package index."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
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
    split = plan.decision("disaggregation").params
    nixl = isinstance(split, DisaggregationParams) and split.connector == "NixlConnector"
    if nixl and not any(importlib.util.find_spec(name) for name in _NIXL_MODULES):
        raise UnsupportedError(
            "disaggregation on GPUs needs NIXL, which is not installed here", hint="run: pip install nixl"
        )


def router_command(router_args: ServeArguments) -> list[str]:
    """Return the argument list that starts the router."""
    return python_command("-m", supervised.__name__, "vllm_router.launch_router", *router_args.words)


def router_environment(plan_path: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the router's environment: this process's, with the plan by which its processes are found."""
    environ = os.environ if environ is None else environ
    # The router would send the key to every server, and reach servers on this machine through the proxy.
    kept = {name: value for name, value in environ.items() if name.upper() not in _NOT_FOR_THE_ROUTER}
    return {**python_environment(kept), env.PLAN: str(plan_path), env.LAUNCHER: this_process()}
