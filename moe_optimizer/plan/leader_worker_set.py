"""Renders a plan as Kubernetes LeaderWorkerSets with the Service before them. Nothing here runs anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.server_command import (
    RAY_PORT,
    START_S,
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
from moe_optimizer.plan.server_group import SIDE_CHANNEL_HOST, ServerGroup, ServerRole

if TYPE_CHECKING:
    import yaml

_PLAN_MOUNT = "/plan"
_RUN_DIR = "/tmp/moe-optimizer"
_MODEL_MOUNT = "/model"
_COMMENT = "Put in your own: the image (vLLM with moe-optimizer{more}), and the claim that holds the model's folder."
_RAY = " and, for a server on several machines, Ray"
_APART = ", NIXL and vllm-router"
_STOP_MARGIN_S = 20
"""Chosen: on top of the time in which a server finishes its requests."""
_PROBE = "moe_optimizer.launcher.progress_probe"
_HEAD = f"$(LWS_LEADER_ADDRESS):{RAY_PORT}"
# A worker may start long before the leader, which still pulls its image. Would it end then, the whole group would be
# made anew, the leader with it.
_JOIN = f"until ray health-check --address {_HEAD}; do sleep 5; done\nexec ray start --address={_HEAD} --block"


def render_lws(plan: Plan) -> str:
    """Return a Service and LeaderWorkerSets (leaderworkerset.x-k8s.io/v1) as YAML for `kubectl apply --server-side`.

    A group of a set is one server: its leader runs `vllm serve`; its workers join the leader's Ray, or run the data
    parallel copies of their machine. Servers for prefill and for decode are a set each, of one pod for each server,
    and a Deployment has the router before them.
    """
    import yaml

    documents: list[dict[str, Any]] = []
    if needs_plan(plan):
        # Pods read the plan's file from it.
        plan_file = {"plan.json": _Block(plan.to_json())}
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{_name(plan)}-plan"}, "data": plan_file}
        )
    documents += _whole_servers(plan) if plan.group is None else _servers_apart(plan, plan.group)
    notes = [_COMMENT.format(more=_RAY if plan.group is None else _APART)]
    notes += [f"{name} lies in the image at {folder}." for name, folder in files_of(plan).items()]
    comment = "".join(f"{line}\n" for text in notes for line in comment_lines(text))
    return comment + yaml.dump_all(documents, Dumper=_dumper(), sort_keys=False, width=110)


def _whole_servers(plan: Plan) -> list[dict[str, Any]]:
    split = plan.parallelism
    template: dict[str, Any] = {"size": split.machines_of_server, "restartPolicy": "RecreateGroupOnPodRestart"}
    if split.pipeline_parallel_size > 1:
        template["leaderTemplate"] = _pod(plan, "leader", [f"ray start --head --port={RAY_PORT}", _serve_in_pod(plan)])
        template["workerTemplate"] = _pod(plan, "worker", [_JOIN])
    elif split.machines_of_copies > 1:
        first = to_first_machine("$(LWS_LEADER_ADDRESS)")
        each = split.data_parallel_size // split.machines_of_copies
        own = without_address(f"$((LWS_WORKER_INDEX * {each}))")
        template["leaderTemplate"] = _pod(plan, "leader", [_serve_in_pod(plan, first)])
        template["workerTemplate"] = _pod(plan, "worker", [_serve_in_pod(plan, [*first, *own])])
    else:
        template["workerTemplate"] = _pod(plan, "leader", [_serve_in_pod(plan)])
    # A set makes a headless Service of its own name, by which pods find each other, unless there is one: ours must not
    # take that name.
    name = f"{_name(plan)}-server"
    return [
        _service(plan, {"leaderworkerset.sigs.k8s.io/name": name, "role": "leader"}),
        _set(name, split.replicas, template),
    ]


def _servers_apart(plan: Plan, group: ServerGroup) -> list[dict[str, Any]]:
    """Return the sets of the prefill and of the decode servers, and the router, which finds each pod by its name."""
    port, sets, urls = port_of(plan), list[dict[str, Any]](), dict[str, str]()
    for kind in ("prefill", "decode"):
        name, servers = f"{_name(plan)}-{kind}", [each for each in group.servers if each.name.startswith(kind)]
        # They differ in address alone, and each pod has one of its own.
        pod = _pod(plan, "leader", [_serve_in_pod(plan, server=servers[0])], servers[0])
        sets.append(_set(name, len(servers), {"size": 1, "workerTemplate": pod}))
        # In the set's own Service each leader has the name of its pod.
        urls |= {server.url: f"http://{name}-{index}.{name}:{port}" for index, server in enumerate(servers)}
    labels = {"app": f"{_name(plan)}-router"}
    return [_service(plan, labels), *sets, _router(plan, labels, router_words(group, host="0.0.0.0", urls=urls))]


def _router(plan: Plan, labels: dict[str, str], words: Sequence[Sequence[str]]) -> dict[str, Any]:
    container = {
        "name": "vllm-router",
        "image": _image(plan),
        "command": [word for flag in words for word in flag],
        "ports": [{"containerPort": port_of(plan)}],
        "readinessProbe": _health(port_of(plan)),
    }
    spec = {"terminationGracePeriodSeconds": _grace_s(plan), "containers": [container]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": labels["app"]},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _service(plan: Plan, selector: dict[str, str]) -> dict[str, Any]:
    port = port_of(plan)
    spec = {"selector": selector, "ports": [{"name": "http", "port": port, "targetPort": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": _name(plan)}, "spec": spec}


def _set(name: str, replicas: int, template: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "leaderWorkerTemplate": template},
    }


class _Block(str):
    """Text that YAML shows as it is, line by line."""

    __slots__ = ()


def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes blocks as blocks, and what stands in several places in each of them."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
            return True

    Dumper.add_representer(
        _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
    )
    return Dumper


def _serve_in_pod(plan: Plan, more: Sequence[str] = (), server: ServerRole | None = None) -> str:
    arguments = None if server is None else server.serve_args
    words = serve_words(plan, model=_MODEL_MOUNT, host="0.0.0.0", port=port_of(plan), arguments=arguments)
    return "exec " + " ".join([*map(shlex.join, words), *more])


def _pod(plan: Plan, role: str, commands: list[str], server: ServerRole | None = None) -> dict[str, Any]:
    """Return the template of a pod; `server` is one of a group, None: the plan's only one, or a part of it."""
    port = port_of(plan)
    steps = [f"mkdir -p {_RUN_DIR} && cp {_PLAN_MOUNT}/plan.json {_RUN_DIR}/"] if needs_plan(plan) else []
    steps += commands
    pods = plan.parallelism.replicas * plan.parallelism.machines_of_server
    environment = server_environment(plan, _RUN_DIR) | (dict(server.serve_env) if server is not None else {})
    # The pod's own address is known to itself alone.
    own_address = ["VLLM_HOST_IP", *([SIDE_CHANNEL_HOST] if environment.pop(SIDE_CHANNEL_HOST, None) else [])]
    container: dict[str, Any] = {
        "name": f"vllm-{role}",
        "image": _image(plan),
        "command": ["sh", "-ec"],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"limits": {"nvidia.com/gpu": plan.num_gpus // pods if server is None else len(server.gpus)}},
        "volumeMounts": [
            {"name": "model", "mountPath": _MODEL_MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if role == "leader":
        container["ports"] = [{"containerPort": port}]
        container |= _probes(port)
    container["args"] = ["\n".join(steps)]
    pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
    container["env"] += [{"name": name, "valueFrom": pod_ip} for name in own_address]
    volumes: list[dict[str, Any]] = [
        {"name": "model", "persistentVolumeClaim": {"claimName": "model", "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if needs_plan(plan):
        container["volumeMounts"].append({"name": "plan", "mountPath": _PLAN_MOUNT, "readOnly": True})
        volumes.append({"name": "plan", "configMap": {"name": f"{_name(plan)}-plan"}})
    spec = {"terminationGracePeriodSeconds": _grace_s(plan), "containers": [container], "volumes": volumes}
    return {"metadata": {"labels": {"role": role}}, "spec": spec}


def _image(plan: Plan) -> str:
    return f"registry.example/vllm-moe-optimizer:{plan.vllm_version or 'latest'}"


def _grace_s(plan: Plan) -> int:
    # Kubernetes' own 30 s would end a pod while the last requests are answered.
    return int(plan.serve_args.drain_timeout_s()) + _STOP_MARGIN_S


def _health(port: int) -> dict[str, Any]:
    return {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10}


def _probes(port: int) -> dict[str, Any]:
    """Return the probes of a server: up to half an hour to start, then requests must get on for it to live."""
    health = _health(port)
    progress = {"exec": {"command": ["python3", "-P", "-m", _PROBE, str(port)]}}
    return {
        "startupProbe": {**health, "failureThreshold": START_S // 10},
        "readinessProbe": health,
        "livenessProbe": {**progress, "periodSeconds": 20, "timeoutSeconds": 15, "failureThreshold": 3},
    }


def _name(plan: Plan) -> str:
    """Return the model's name as Kubernetes takes it: small letters, digits and dashes, at most 40.

    A set's name is up to 8 characters longer, and it names StatefulSets after its groups: of more than 52 characters
    the labels that those give their pods would be too long.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", plan.model.name.rsplit("/", 1)[-1].lower()).strip("-")
    return f"vllm-{plain[:35].strip('-') or 'model'}"
