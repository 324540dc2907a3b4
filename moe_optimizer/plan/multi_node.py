"""Renders a plan for several machines as commands for each of them, or as a LeaderWorkerSet.

Nothing here runs anything. Where machines are replicas, each runs the plan's one command by itself. The stages of a
pipeline are started through Ray. Of data parallel copies each machine starts its own, and they find the first machine.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_optimizer.plan.decision import Applier
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import argument_lines

if TYPE_CHECKING:
    import yaml

RAY_PORT = 6379
"""Ray's own default."""
_WIDTH = 78
_PLAN_MOUNT = "/plan"
_RUN_DIR = "/tmp/moe-optimizer"
_MODEL_MOUNT = "/model"
_COMMENT = """\
# Put in your own: the image (vLLM with moe-optimizer and, for a server on several machines, Ray), and the claim that
# holds the model's folder.
"""
_STOP_MARGIN_S = 20
"""Chosen: on top of the time in which a server finishes its requests."""
_PORT = 8000
"""vLLM's own default."""
_COPIES_PORT = 29550
"""vLLM's own default."""
_START_S = 1800
"""As `serve --ready-timeout`."""
_PROBE = "moe_optimizer.launcher.progress_probe"
_HEAD = f"$(LWS_LEADER_ADDRESS):{RAY_PORT}"
# A worker may start long before the leader, which still pulls its image. Would it end then, the whole group would be
# made anew, the leader with it.
_JOIN = f"until ray health-check --address {_HEAD}; do sleep 5; done\nexec ray start --address={_HEAD} --block"


def render_machines(plan: Plan) -> str:
    """Return the commands for every machine as lines of shell, with what they need as comments."""
    nodes, split = plan.num_nodes, plan.parallelism
    lines = _comment(
        f"{plan.model.name} on {nodes} machines of {plan.num_gpus // nodes} GPUs each. Every machine has vLLM "
        f"{plan.vllm_version or '>= 0.26'}, moe-optimizer, and the model at the same path."
    )
    if _needs_plan(plan):
        lines += _comment(
            "The plan travels as a file: the same command with --json instead of --render makes it; it lies at "
            "RUN_DIR/plan.json on every machine."
        )
    for name, folder in _files(plan).items():
        lines += _comment(f"{name} lies at {folder} on every machine.")
    environment = [f"export {name}={shlex.quote(value)}" for name, value in _environment(plan, "RUN_DIR").items()]
    if split.machines_of_copies > 1:
        return "\n".join([*lines, *_copies_of_machines(plan, environment)]) + "\n"
    if split.pipeline_parallel_size == 1:
        servers = split.replicas // nodes
        what = "a whole server by itself" if servers == 1 else f"{servers} whole servers by themselves"
        lines += [
            "",
            *_comment(
                f"On each of the {nodes} machines: {what}, so no Ray; ADDRESS is the machine's own. "
                "Any HTTP load balancer before them spreads the requests, for example vllm-router."
            ),
            *environment,
            *_servers_of_a_machine(plan, servers),
        ]
        return "\n".join(lines) + "\n"
    others = "the other machine" if nodes == 2 else f"each of the other {nodes - 1} machines"
    lines += [
        *_comment("Every machine has Ray (pip install ray), which starts vLLM's workers on the others; "
                  f"Ray's port {RAY_PORT} and the ports that Ray, NCCL and vLLM choose are open between them."),
        "",
        *_comment("On the first machine; HEAD is its address:"),
        *environment,
        "export VLLM_HOST_IP=HEAD",
        f"ray start --head --node-ip-address=HEAD --port={RAY_PORT}",
        "",
        *_comment(f"On {others}; ADDRESS is its own address:"),
        *environment,
        "export VLLM_HOST_IP=ADDRESS",
        f"ray start --address=HEAD:{RAY_PORT} --node-ip-address=ADDRESS",
        "",
        *_comment(f"Then on the first machine, once `ray status` shows {plan.num_gpus} GPUs:"),
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
    lines = _comment(
        f"No Ray: each machine starts its own copies. Between the machines port {_COPIES_PORT} and the ports that "
        f"NCCL and vLLM choose are open.{group}"
    )
    lines += [
        "",
        *_comment("On the first machine; HEAD is its address:"),
        *environment,
        "export VLLM_HOST_IP=HEAD",
        *_command(plan, host="HEAD", more=_find_first("HEAD")),
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
        *_comment(f"On {others}:"),
        *environment,
        "export VLLM_HOST_IP=ADDRESS",
        *_command(plan, more=[*_find_first("HEAD"), *_without_address(first_copy)]),
    ]


def _without_address(first_copy: str) -> list[str]:
    return ["--headless", f"--data-parallel-start-rank {first_copy}"]


def _find_first(head: str) -> list[str]:
    return [f"--data-parallel-address {head}", f"--data-parallel-rpc-port {_COPIES_PORT}"]


def _servers_of_a_machine(plan: Plan, count: int) -> list[str]:
    """Return the commands of a machine's servers; several have GPUs and a port each, and run beside each other."""
    if count == 1:
        return _command(plan, host="ADDRESS")
    gpus, port, lines = plan.num_gpus // plan.parallelism.replicas, _port(plan), list[str]()
    for number in range(count):
        own = ",".join(map(str, range(number * gpus, (number + 1) * gpus)))
        first, *rest = _command(plan, host="ADDRESS", port=port + number)
        lines += [f"CUDA_VISIBLE_DEVICES={own} {first}", *rest]
        lines[-1] += " &"
    return [*lines, "wait"]


def _port(plan: Plan) -> int:
    return plan.serve_args.count("--port") or _PORT


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def render_lws(plan: Plan) -> str:
    """Return a Service and a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) as YAML for `kubectl apply -f -`.

    A group of the set is one server: its leader runs `vllm serve`; its workers join the leader's Ray, or run the data
    parallel copies of their machine.
    """
    import yaml

    name, split = _name(plan), plan.parallelism
    template: dict[str, Any] = {"size": split.machines_of_server, "restartPolicy": "RecreateGroupOnPodRestart"}
    if split.pipeline_parallel_size > 1:
        template["leaderTemplate"] = _pod(plan, "leader", [f"ray start --head --port={RAY_PORT}", _serve_in_pod(plan)])
        template["workerTemplate"] = _pod(plan, "worker", [_JOIN])
    elif split.machines_of_copies > 1:
        first = _find_first("$(LWS_LEADER_ADDRESS)")
        each = split.data_parallel_size // split.machines_of_copies
        own = _without_address(f"$((LWS_WORKER_INDEX * {each}))")
        template["leaderTemplate"] = _pod(plan, "leader", [_serve_in_pod(plan, first)])
        template["workerTemplate"] = _pod(plan, "worker", [_serve_in_pod(plan, [*first, *own])])
    else:
        template["workerTemplate"] = _pod(plan, "leader", [_serve_in_pod(plan)])
    port = _port(plan)
    documents: list[dict[str, Any]] = []
    if _needs_plan(plan):
        # Pods read the plan's file from it.
        plan_file = {"plan.json": _Block(plan.to_json())}
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-plan"}, "data": plan_file}
        )
    documents += [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {
                "selector": {"leaderworkerset.sigs.k8s.io/name": name, "role": "leader"},
                "ports": [{"name": "http", "port": port, "targetPort": port}],
            },
        },
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": name},
            "spec": {"replicas": plan.parallelism.replicas, "leaderWorkerTemplate": template},
        },
    ]
    files = [f"{name} lies in the image at {folder}." for name, folder in _files(plan).items()]
    comment = _COMMENT + "".join(f"{line}\n" for text in files for line in _comment(text))
    return comment + yaml.dump_all(documents, Dumper=_dumper(), sort_keys=False, width=110)


class _Block(str):
    """Text that YAML shows as it is, line by line."""

    __slots__ = ()


def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes blocks as blocks."""

    Dumper.add_representer(
        _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
    )
    return Dumper


def _serve_in_pod(plan: Plan, more: Sequence[str] = ()) -> str:
    return "exec " + " ".join([*map(shlex.join, _serve_words(plan, model=_MODEL_MOUNT, host="0.0.0.0")), *more])


def _pod(plan: Plan, role: str, commands: list[str]) -> dict[str, Any]:
    port = _port(plan)
    steps = [f"mkdir -p {_RUN_DIR} && cp {_PLAN_MOUNT}/plan.json {_RUN_DIR}/"] if _needs_plan(plan) else []
    steps += commands
    pods = plan.parallelism.replicas * plan.parallelism.machines_of_server
    container: dict[str, Any] = {
        "name": f"vllm-{role}",
        "image": f"registry.example/vllm-moe-optimizer:{plan.vllm_version or 'latest'}",
        "command": ["sh", "-ec"],
        "env": [{"name": key, "value": value} for key, value in _environment(plan, _RUN_DIR).items()],
        "resources": {"limits": {"nvidia.com/gpu": plan.num_gpus // pods}},
        "volumeMounts": [
            {"name": "model", "mountPath": _MODEL_MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if role == "leader":
        container["ports"] = [{"containerPort": port}]
        container |= _probes(port)
    container["args"] = ["\n".join(steps)]
    container["env"].append({"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    volumes: list[dict[str, Any]] = [
        {"name": "model", "persistentVolumeClaim": {"claimName": "model", "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if _needs_plan(plan):
        container["volumeMounts"].append({"name": "plan", "mountPath": _PLAN_MOUNT, "readOnly": True})
        volumes.append({"name": "plan", "configMap": {"name": f"{_name(plan)}-plan"}})
    # Kubernetes' own 30 s would end the pod while the last requests are answered.
    grace_s = int(plan.serve_args.drain_timeout_s()) + _STOP_MARGIN_S
    spec = {"terminationGracePeriodSeconds": grace_s, "containers": [container], "volumes": volumes}
    return {"metadata": {"labels": {"role": role}}, "spec": spec}


def _probes(port: int) -> dict[str, Any]:
    """Return the probes of a server: up to half an hour to start, then requests must get on for it to live."""
    health = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10}
    progress = {"exec": {"command": ["python3", "-P", "-m", _PROBE, str(port)]}}
    return {
        "startupProbe": {**health, "failureThreshold": _START_S // 10},
        "readinessProbe": health,
        "livenessProbe": {**progress, "periodSeconds": 20, "timeoutSeconds": 15, "failureThreshold": 3},
    }


def _environment(plan: Plan, folder: str) -> dict[str, str]:
    """Return the variables of the server processes; Ray's workers have those with which Ray was started."""
    own = {"MOE_OPTIMIZER_PLAN": f"{folder}/plan.json"} if _needs_plan(plan) else {}
    return own | dict(sorted(plan.serve_env.items()))


def _files(plan: Plan) -> dict[str, str]:
    """Return the pass whose files the servers read, and the folder that they are in."""
    return {
        decision.pass_name: folder
        for decision in plan.decisions
        if decision.applier is Applier.FILES
        for folder in decision.env.values()
    }


def _needs_plan(plan: Plan) -> bool:
    return any(decision.applier is Applier.PLUGIN for decision in plan.decisions)


def _serve_words(plan: Plan, *, model: str, host: str | None = None, port: int | None = None) -> list[Sequence[str]]:
    """Return the words of the command, flag and values together."""
    words: list[Sequence[str]] = [("vllm", "serve", model)]
    for argument in plan.serve_args.arguments:
        own = {"--host": host, "--port": port}.get(argument.flag)
        words.append(argument.words if own is None else (argument.flag, str(own)))
    if model != plan.model.path and "--served-model-name" not in plan.serve_args:
        words.append(("--served-model-name", plan.model.name))
    return words


def _command(plan: Plan, host: str | None = None, port: int | None = None, more: Sequence[str] = ()) -> list[str]:
    first, *rest = _serve_words(plan, model=plan.model.path, host=host, port=port)
    width = _WIDTH - len("  " + " \\")
    arguments = [line for words in rest for line in argument_lines(words, width)]
    lines = [shlex.join(first), *(f"  {line}" for line in [*arguments, *more])]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _name(plan: Plan) -> str:
    """Return the model's name as Kubernetes takes it: small letters, digits and dashes, at most 50."""
    plain = re.sub(r"[^a-z0-9]+", "-", plan.model.name.rsplit("/", 1)[-1].lower()).strip("-")
    return f"vllm-{plain[:44].strip('-') or 'model'}"
