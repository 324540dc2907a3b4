"""Makes the command of a server as a machine or a pod starts it: its words, environment, and what it reads; and that of
the router before servers for prefill and decode.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from moe_optimizer.plan.decision import Applier
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerGroup

WIDTH = 78
"""Of comments and commands."""
RAY_PORT = 6379
"""Ray's own default."""
COPIES_PORT = 29550
"""vLLM's own default."""
START_S = 1800
"""Of a server, as `serve --ready-timeout`."""
_PORT = 8000
"""vLLM's own default."""


def serve_words(
    plan: Plan,
    *,
    model: str,
    host: str | None = None,
    port: int | None = None,
    arguments: ServeArguments | None = None,
) -> list[Sequence[str]]:
    """Return the words of the command, flag and values together.

    Args:
        plan: what is served.
        model: its folder.
        host: in place of the planned one, if given.
        port: the same.
        arguments: those of a server of a group; None: the plan's.
    """
    words: list[Sequence[str]] = [("vllm", "serve", model)]
    for argument in (arguments or plan.serve_args).arguments:
        own = {"--host": host, "--port": port}.get(argument.flag)
        words.append(argument.words if own is None else (argument.flag, str(own)))
    if model != plan.model.path and "--served-model-name" not in plan.serve_args:
        words.append(("--served-model-name", plan.model.name))
    return words


def router_words(
    group: ServerGroup, *, host: str | None = None, urls: Mapping[str, str] | None = None
) -> list[Sequence[str]]:
    """Return the words of the router's command, flag and values together; it waits for the servers as they start.

    Args:
        group: the servers behind it.
        host: in place of the planned one, if given.
        urls: of servers, planned -> other; those that are missing stay.
    """
    words: list[Sequence[str]] = [("vllm-router",)]
    for argument in group.router_args.arguments:
        own = host if argument.flag == "--host" and host else (urls or {}).get(argument.value)
        words.append(argument.words if own is None else (argument.flag, own))
    return [*words, ("--worker-startup-timeout-secs", str(START_S))]


def server_environment(plan: Plan, folder: str) -> dict[str, str]:
    """Return the variables of the server processes; Ray's workers have those with which Ray was started."""
    own = {"MOE_OPTIMIZER_PLAN": f"{folder}/plan.json"} if needs_plan(plan) else {}
    return own | dict(sorted(plan.serve_env.items()))


def files_of(plan: Plan) -> dict[str, str]:
    """Return the pass whose files the servers read, and the folder that they are in."""
    return {
        decision.pass_name: folder
        for decision in plan.decisions
        if decision.applier is Applier.FILES
        for folder in decision.env.values()
    }


def needs_plan(plan: Plan) -> bool:
    """Return whether the plugin carries out a decision, for which it reads the plan's file."""
    return any(decision.applier is Applier.PLUGIN for decision in plan.decisions)


def port_of(plan: Plan) -> int:
    """Return the port of the plan's address."""
    return plan.serve_args.count("--port") or _PORT


def to_first_machine(head: str) -> list[str]:
    """Return the arguments by which copies on several machines find the first one, whose address is `head`."""
    return [f"--data-parallel-address {head}", f"--data-parallel-rpc-port {COPIES_PORT}"]


def without_address(first_copy: str) -> list[str]:
    """Return the arguments of a machine that only computes, from its first copy's number."""
    return ["--headless", f"--data-parallel-start-rank {first_copy}"]


def comment_lines(text: str) -> list[str]:
    """Return a text as comments of a shell."""
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
