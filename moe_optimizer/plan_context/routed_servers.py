"""Makes the arguments, ports and environments of several servers behind one router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_optimizer.errors import InputError
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerRole
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cpu_cores import BINDING, core_lists

LOCAL = "127.0.0.1"
"""Where the servers listen: only the router is for others."""
UNSAFE_FLAGS: Mapping[str, str] = {
    "--ssl-certfile": "vllm-router speaks plain HTTP",
}
"""Arguments of the user's that servers behind the router cannot have, and why."""
UNSAFE_FLAGS_APART: Mapping[str, str] = {
    "--kv-transfer-config": "the connector between the servers is the plan's",
    "--kv-offloading-size": "vLLM puts its connector in the place of the one between the servers; "
    "--enable-kv-tiering adds one beside it",
    "--speculative-config": "it was not run with disaggregation",
    **UNSAFE_FLAGS,
}
"""Those that servers for prefill and decode cannot have."""
_MAX_PORT = 65_535


def unsafe_flag(ctx: PlanContext, unsafe: Mapping[str, str]) -> str:
    """Return which of the user's arguments servers behind a router cannot have, with the reason; "" if none."""
    return next((f"{flag} is given after --: {reason}" for flag, reason in unsafe.items() if flag in ctx.pinned), "")


def undividable_cpu(ctx: PlanContext, num_servers: int) -> str:
    """Return why the CPU cannot be divided between so many servers, or ""."""
    if ctx.cpu.cores < num_servers:
        return f"needs at least {num_servers} CPU cores, one for each server, found {ctx.cpu.cores}"
    for kind, size in zip(("tensor", "data"), ctx.asked_sizes, strict=True):
        if size is not None and size > 1:
            return f"on the CPU each server is one process, and {kind} parallelism of {size} is asked for"
    return ""


def plan_port(serve_args: ServeArguments, *, ports_after: int, asked_by: str) -> int:
    """Return the port of the plan's address, which the router takes.

    Raises:
        InputError: so many ports after it do not exist.
    """
    port = serve_args.count("--port")
    assert port is not None, f"no port: {serve_args}"
    if port + ports_after > _MAX_PORT:
        raise InputError(f"--port: got {port}, but {asked_by} needs the ports after it too",
                         hint="choose a port below 60000")  # fmt: skip
    return port


def local_servers(ctx: PlanContext, serve_args: ServeArguments, port: int, names: Sequence[str]) -> list[ServerRole]:
    """Return servers that only the router talks to: ports after the router's, each with its share of the devices."""
    on_cpu, each = ctx.device == "cpu", ctx.parallelism.num_devices
    cores = core_lists(ctx.cpu.core_ids, len(names)) if on_cpu else ()
    return [
        ServerRole(
            name=name,
            serve_args=serve_args.overridden_by(ServeArguments("--host", LOCAL, "--port", str(port + 1 + index))),
            serve_env={BINDING: cores[index]} if on_cpu else {},
            gpus=() if on_cpu else tuple(range(index * each, (index + 1) * each)),
        )
        for index, name in enumerate(names)
    ]


def server_url(server: ServerRole) -> str:
    """Return where the router finds a server."""
    return f"http://{LOCAL}:{server.serve_args.value('--port')}"


def router_args(serve_args: ServeArguments, port: int, num_servers: int) -> ServeArguments:
    """Return the router's arguments but for its servers: address, a port for its metrics, requests in turns."""
    host, metrics_port = serve_args.value("--host") or LOCAL, str(port + 1 + num_servers)
    address = ServeArguments("--host", host, "--port", str(port), "--prometheus-port", metrics_port)
    return address + ServeArguments("--policy", "round_robin", "--worker-startup-check-interval", "1")
