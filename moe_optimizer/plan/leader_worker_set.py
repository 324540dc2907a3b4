"""Renders a plan as a Kubernetes LeaderWorkerSet with the Service before it. Nothing here runs anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.server_command import (
    RAY_PORT,
    comment_lines,
    files_of,
    needs_plan,
    port_of,
    serve_words,
    server_environment,
    to_first_machine,
    without_address,
)

if TYPE_CHECKING:
    import yaml

_PLAN_MOUNT = "/plan"
_RUN_DIR = "/tmp/moe-optimizer"
_MODEL_MOUNT = "/model"
_COMMENT = """\
# Put in your own: the image (vLLM with moe-optimizer and, for a server on several machines, Ray), and the claim that
# holds the model's folder.
"""
_STOP_MARGIN_S = 20
"""Chosen: on top of the time in which a server finishes its requests."""
_START_S = 1800
"""As `serve --ready-timeout`."""
_PROBE = "moe_optimizer.launcher.progress_probe"
_HEAD = f"$(LWS_LEADER_ADDRESS):{RAY_PORT}"
# A worker may start long before the leader, which still pulls its image. Would it end then, the whole group would be
# made anew, the leader with it.
_JOIN = f"until ray health-check --address {_HEAD}; do sleep 5; done\nexec ray start --address={_HEAD} --block"


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
        first = to_first_machine("$(LWS_LEADER_ADDRESS)")
        each = split.data_parallel_size // split.machines_of_copies
        own = without_address(f"$((LWS_WORKER_INDEX * {each}))")
        template["leaderTemplate"] = _pod(plan, "leader", [_serve_in_pod(plan, first)])
        template["workerTemplate"] = _pod(plan, "worker", [_serve_in_pod(plan, [*first, *own])])
    else:
        template["workerTemplate"] = _pod(plan, "leader", [_serve_in_pod(plan)])
    port = port_of(plan)
    documents: list[dict[str, Any]] = []
    if needs_plan(plan):
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
    notes = [f"{name} lies in the image at {folder}." for name, folder in files_of(plan).items()]
    comment = _COMMENT + "".join(f"{line}\n" for text in notes for line in comment_lines(text))
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
    return "exec " + " ".join([*map(shlex.join, serve_words(plan, model=_MODEL_MOUNT, host="0.0.0.0")), *more])


def _pod(plan: Plan, role: str, commands: list[str]) -> dict[str, Any]:
    port = port_of(plan)
    steps = [f"mkdir -p {_RUN_DIR} && cp {_PLAN_MOUNT}/plan.json {_RUN_DIR}/"] if needs_plan(plan) else []
    steps += commands
    pods = plan.parallelism.replicas * plan.parallelism.machines_of_server
    container: dict[str, Any] = {
        "name": f"vllm-{role}",
        "image": f"registry.example/vllm-moe-optimizer:{plan.vllm_version or 'latest'}",
        "command": ["sh", "-ec"],
        "env": [{"name": key, "value": value} for key, value in server_environment(plan, _RUN_DIR).items()],
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
    if needs_plan(plan):
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


def _name(plan: Plan) -> str:
    """Return the model's name as Kubernetes takes it: small letters, digits and dashes, at most 50."""
    plain = re.sub(r"[^a-z0-9]+", "-", plan.model.name.rsplit("/", 1)[-1].lower()).strip("-")
    return f"vllm-{plain[:44].strip('-') or 'model'}"
