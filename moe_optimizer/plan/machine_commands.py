"""Renders a plan for several machines as commands for each of them. Nothing here runs anything.

Where machines are replicas, each runs the plan's one command by itself. The stages of a pipeline are started through
Ray. Of data parallel copies each machine starts its own, and they find the first machine.
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
    serve_words,
    server_environment,
    to_first_machine,
    without_address,
)


def render_machines(plan: Plan) -> str:
    """Return the commands for every machine as lines of shell, with what they need as comments."""
    nodes, split = plan.num_nodes, plan.parallelism
    lines = comment_lines(
        f"{plan.model.name} on {nodes} machines of {plan.num_gpus // nodes} GPUs each. Every machine has vLLM "
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
    others = "the other machine" if nodes == 2 else f"each of the other {nodes - 1} machines"
    lines += [
        *comment_lines("Every machine has Ray (pip install ray), which starts vLLM's workers on the others; "
                  f"Ray's port {RAY_PORT} and the ports that Ray, NCCL and vLLM choose are open between them."),
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
        *comment_lines(f"Then on the first machine, once `ray status` shows {plan.num_gpus} GPUs:"),
        *_command(plan),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _copies_of_machines(plan: Plan, environment: list[str]) -> list[str]:
    """Return the commands of the machines of one server: the first answers, the others have no address."""
    split = plan.parallelism
    machines, servers = split.machines_of_copies, split.replicas
    each = split.data_parallel_size // machines
    group = "" if servers == 1 else (
        f" The {plan.num_nodes} machines are {servers} groups of {machines}, each a server by itself, with a HEAD of "
        "its own; any HTTP load balancer before them spreads the requests."
    )  # fmt: skip
    lines = comment_lines(
        f"No Ray: each machine starts its own copies. Between the machines port {COPIES_PORT} and the ports that "
        f"NCCL and vLLM choose are open.{group}"
    )
    lines += [
        "",
        *comment_lines("On the first machine; HEAD is its address:"),
        *environment,
        "export VLLM_HOST_IP=HEAD",
        *_command(plan, host="HEAD", more=to_first_machine("HEAD")),
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
    if count == 1:
        return _command(plan, host="ADDRESS")
    gpus, port, lines = plan.num_gpus // plan.parallelism.replicas, port_of(plan), list[str]()
    for number in range(count):
        own = ",".join(map(str, range(number * gpus, (number + 1) * gpus)))
        first, *rest = _command(plan, host="ADDRESS", port=port + number)
        lines += [f"CUDA_VISIBLE_DEVICES={own} {first}", *rest]
        lines[-1] += " &"
    return [*lines, "wait"]


def _command(plan: Plan, host: str | None = None, port: int | None = None, more: Sequence[str] = ()) -> list[str]:
    first, *rest = serve_words(plan, model=plan.model.path, host=host, port=port)
    width = WIDTH - len("  " + " \\")
    arguments = [line for words in rest for line in argument_lines(words, width)]
    lines = [shlex.join(first), *(f"  {line}" for line in [*arguments, *more])]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
