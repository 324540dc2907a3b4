"""Renders a plan for several machines as commands for each of them. Nothing here runs anything.

Where machines are replicas, each runs the plan's one command by itself. The stages of a pipeline are started through
Ray. Of data parallel copies each machine starts its own, and they find the first machine. Servers for prefill and
decode are started each on its machine, and the first one has the router before them all.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import argument_lines
from moe_optimizer.plan.server_command import (
    COPIES_PORT,
    RAY_PORT,
    WIDTH,
    comment_lines,
    files_of,
    needs_plan,
    port_of,
    router_words,
    serve_words,
    server_environment,
    to_first_machine,
    without_address,
)
from moe_optimizer.plan.server_group import LOCAL, ServerGroup, ServerRole, machine_address

_NAMED = 4
"""Chosen: of more machines only the first and the last address are named."""


def render_machines(plan: Plan) -> str:
    """Return the commands for every machine as lines of shell, with what they need as comments."""
    nodes, split = plan.num_nodes, plan.parallelism
    lines = comment_lines(
        f"{plan.model.name} on {nodes} machines of {plan.hardware.num_gpus} GPUs each. Every machine has vLLM "
        f"{plan.vllm_version or '>= 0.26'}, moe-optimizer, and the model at the same path."
    )
    if needs_plan(plan):
        lines += comment_lines(
            "The plan travels as a file: the same command with --json instead of --render makes it; it lies at "
            "RUN_DIR/plan.json on every machine."
        )
    for name, folder in files_of(plan).items():
        lines += comment_lines(f"{name} lies at {folder} on every machine.")
    environment = [f"export {name}={shlex.quote(value)}" for name, value in server_environment(plan, "RUN_DIR").items()]
    if plan.group is not None:
        return "\n".join([*lines, *_servers_apart(plan, plan.group, environment)]) + "\n"
    if split.machines_of_copies > 1:
        return "\n".join([*lines, *_copies_of_machines(plan, environment)]) + "\n"
    if split.pipeline_parallel_size == 1:
        servers = split.replicas // nodes
        what = "a whole server by itself" if servers == 1 else f"{servers} whole servers by themselves"
        lines += [
            "",
            *comment_lines(
                f"On each of the {nodes} machines: {what}, so no Ray; ADDRESS is the machine's own. "
                "Any HTTP load balancer before them spreads the requests, for example vllm-router."
            ),
            *environment,
            *_servers_of_a_machine(plan, servers),
        ]
        return "\n".join(lines) + "\n"
    return "\n".join([*lines, *_stages_of_machines(plan, environment)]) + "\n"


def _asked_host(plan: Plan, address: str) -> str:
    """Return where what takes requests listens: where the user says, else on its machine's address."""
    planned = plan.serve_args.value("--host")
    return address if planned in (None, LOCAL) else planned


def _servers_apart(plan: Plan, group: ServerGroup, environment: list[str]) -> list[str]:
    """Return the commands of each machine's prefill and decode servers, and of the router before all of them."""
    addresses = [machine_address(machine) for machine in range(plan.num_nodes)]
    where = f"{', '.join(addresses[:-1])} and {addresses[-1]}"
    if len(addresses) > _NAMED:
        where = f"{addresses[0]} to {addresses[-1]}"
    lines = comment_lines(
        f"Every machine has NIXL too (pip install nixl), and machine 0 vllm-router (pip install vllm-router). {where} "
        "stand for the machines' addresses, also in the router's command. Between the machines the ports of the "
        "servers and of NIXL (VLLM_NIXL_SIDE_CHANNEL_PORT) and those that UCX chooses are open, and for nobody else: "
        "the servers answer whoever reaches them."
    )
    for machine, address in enumerate(addresses):
        servers = [server for server in group.servers if server.machine == machine]
        lines += ["", *comment_lines(f"On machine {machine}, whose address is {address}:"), *environment]
        lines += [line for server in servers for line in _server_apart(plan, server)]
        lines += ["wait"]
    return [
        *lines,
        "",
        *comment_lines("Beside them on machine 0; it waits until all servers answer, and takes the requests:"),
        *_lines(router_words(group, host=_asked_host(plan, addresses[0]))),
    ]


def _server_apart(plan: Plan, server: ServerRole) -> list[str]:
    gpus = ",".join(map(str, server.gpus))
    own = {"CUDA_VISIBLE_DEVICES": gpus, **server.serve_env}
    command = _lines(serve_words(plan, model=plan.model.path, arguments=server.serve_args))
    command[-1] += " &"
    return [f"# {server.name}", *(f"{name}={shlex.quote(value)} \\" for name, value in own.items()), *command]


def _groups(plan: Plan) -> str:
    """Return that the machines are several servers; "" where they are one."""
    split = plan.parallelism
    if split.replicas == 1:
        return ""
    return (
        f" The {plan.num_nodes} machines are {split.replicas} groups of {split.machines_of_server}, each a server by "
        "itself, with a HEAD of its own; any HTTP load balancer before them spreads the requests."
    )


def _stages_of_machines(plan: Plan, environment: list[str]) -> list[str]:
    """Return the commands of the machines of one server whose layers they share: Ray, then vLLM on the first."""
    machines = plan.parallelism.machines_of_server
    others = "the other machine" if machines == 2 else f"each of the other {machines - 1} machines"
    gpus = plan.num_gpus // plan.parallelism.replicas
    return [
        *comment_lines("Every machine has Ray (pip install ray), which starts vLLM's workers on the others; "
                  f"Ray's port {RAY_PORT} and the ports that Ray, NCCL and vLLM choose are open between them."
                  f"{_groups(plan)}"),
        "",
        *comment_lines("On the first machine; HEAD is its address:"),
        *environment,
        "export VLLM_HOST_IP=HEAD",
        f"ray start --head --node-ip-address=HEAD --port={RAY_PORT}",
        "",
        *comment_lines(f"On {others}; ADDRESS is its own address:"),
        *environment,
        "export VLLM_HOST_IP=ADDRESS",
        f"ray start --address=HEAD:{RAY_PORT} --node-ip-address=ADDRESS",
        "",
        *comment_lines(f"Then on the first machine, once `ray status` shows {gpus} GPUs:"),
        *_command(plan, host=_asked_host(plan, "HEAD")),
    ]  # fmt: skip


def _copies_of_machines(plan: Plan, environment: list[str]) -> list[str]:
    """Return the commands of the machines of one server: the first answers, the others have no address."""
    split = plan.parallelism
    machines = split.machines_of_copies
    each = split.data_parallel_size // machines
    lines = comment_lines(
        f"No Ray: each machine starts its own copies. Between the machines port {COPIES_PORT} and the ports that "
        f"NCCL and vLLM choose are open.{_groups(plan)}"
    )
    lines += [
        "",
        *comment_lines("On the first machine; HEAD is its address:"),
        *environment,
        "export VLLM_HOST_IP=HEAD",
        *_command(plan, host=_asked_host(plan, "HEAD"), more=to_first_machine("HEAD")),
    ]
    others = "the other machine; ADDRESS is its own address"
    if machines > 2:
        others = (
            f"each of the other {machines - 1} machines; ADDRESS is its own address, MACHINE is 1 on the second "
            "machine, 2 on the third"
        )
    first_copy = str(each) if machines == 2 else f"$((MACHINE * {each}))"
    return [
        *lines,
        "",
        *comment_lines(f"On {others}:"),
        *environment,
        "export VLLM_HOST_IP=ADDRESS",
        *_command(plan, more=[*to_first_machine("HEAD"), *without_address(first_copy)]),
    ]


def _servers_of_a_machine(plan: Plan, count: int) -> list[str]:
    """Return the commands of a machine's servers; several have GPUs and a port each, and run beside each other."""
    host = _asked_host(plan, "ADDRESS")
    if count == 1:
        return _command(plan, host=host)
    gpus, port, lines = plan.num_gpus // plan.parallelism.replicas, port_of(plan), list[str]()
    for number in range(count):
        own = ",".join(map(str, range(number * gpus, (number + 1) * gpus)))
        first, *rest = _command(plan, host=host, port=port + number)
        lines += [f"CUDA_VISIBLE_DEVICES={own} {first}", *rest]
        lines[-1] += " &"
    return [*lines, "wait"]


def _command(plan: Plan, host: str | None = None, port: int | None = None, more: Sequence[str] = ()) -> list[str]:
    return _lines(serve_words(plan, model=plan.model.path, host=host, port=port), more)


def _lines(words: Sequence[Sequence[str]], more: Sequence[str] = ()) -> list[str]:
    """Return a command as lines of shell; `more` are arguments as a shell takes them."""
    first, *rest = words
    width = WIDTH - len("  " + " \\")
    arguments = [line for words in rest for line in argument_lines(words, width)]
    lines = [shlex.join(first), *(f"  {line}" for line in [*arguments, *more])]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
