"""Makes the arguments, ports and environments of several servers behind one router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moe_optimizer.errors import InputError
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import LOCAL, ServerRole, machine_address
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cpu_cores import BINDING, core_lists

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


def servers_behind_router(
    ctx: PlanContext, serve_args: ServeArguments, port: int, machine_of: Mapping[str, int]
) -> list[ServerRole]:
    """Return servers that only the router talks to: ports after the router's, each with its share of the devices.

    Args:
        ctx: with the decision how the devices of a server share the model.
        serve_args: what the servers have in common.
        port: the router's. The servers of each machine begin after it.
        machine_of: name -> machine, counted from 0, in the order of the servers.
    """
    on_cpu, each = ctx.device == "cpu", ctx.parallelism.num_devices
    cores = core_lists(ctx.cpu.core_ids, len(machine_of)) if on_cpu else ()
    placed, servers = Counter[int](), list[ServerRole]()
    for name, machine in machine_of.items():
        place, host = placed[machine], LOCAL if ctx.request.num_nodes == 1 else machine_address(machine)
        placed[machine] += 1
        address = ServeArguments("--host", host, "--port", str(port + 1 + place))
        servers.append(
            ServerRole(
                name=name,
                serve_args=serve_args.overridden_by(address),
                serve_env={BINDING: cores[place]} if on_cpu else {},
                gpus=() if on_cpu else tuple(range(place * each, (place + 1) * each)),
                machine=machine,
            )
        )
    return servers


def router_args(serve_args: ServeArguments, port: int, num_servers: int) -> ServeArguments:
    """Return the router's arguments but for its servers: address, a port for its metrics, requests in turns.

    Args:
        serve_args: with the plan's address, which it takes.
        port: the plan's.
        num_servers: those of its own machine, which have the ports after it.
    """
    host, metrics_port = serve_args.value("--host") or LOCAL, str(port + 1 + num_servers)
    address = ServeArguments("--host", host, "--port", str(port), "--prometheus-port", metrics_port)
    return address + ServeArguments("--policy", "round_robin", "--worker-startup-check-interval", "1")
