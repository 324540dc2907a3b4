"""What starts a plan on several machines of a Kubernetes cluster."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.leader_worker_set import render_lws
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import qwen3_30b_a3b
from tests.unit.plan.several_machines import plan


def test_a_worker_of_the_set_starts_the_copies_of_its_machine(tmp_path):
    """Run by a shell, with a vllm that writes down what it is given."""
    *_, workers = yaml.safe_load_all(render_lws(plan("copies")))
    container = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    (tmp_path / "vllm").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/given\n')
    (tmp_path / "vllm").chmod(0o755)
    # What Kubernetes puts in for the variable; it leaves what it does not know as it is.
    script = container["args"][0].replace("$(LWS_LEADER_ADDRESS)", "leader")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LWS_WORKER_INDEX": "1"}
    subprocess.run([*container["command"], script], env=environment, check=True, timeout=300)
    given = ServeArguments(*(tmp_path / "given").read_text().split()[2:])
    assert given.value("--data-parallel-start-rank") == "4"
    assert given.value("--data-parallel-address") == "leader"
    assert "livenessProbe" not in container


@pytest.mark.parametrize(("kind", "replicas", "size"), [("replicas", 2, 1), ("pipeline", 1, 2)])
def test_the_set_has_a_group_for_each_server(kind, replicas, size):
    made = plan(kind)
    *_, service, workers = yaml.safe_load_all(render_lws(made))
    assert (workers["kind"], workers["apiVersion"]) == ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1")
    group = workers["spec"]["leaderWorkerTemplate"]
    assert (workers["spec"]["replicas"], group["size"]) == (replicas, size)
    templates = [group[key] for key in ("leaderTemplate", "workerTemplate") if key in group]
    assert len(templates) == size
    for template in templates:
        assert template["spec"]["terminationGracePeriodSeconds"] > made.serve_args.drain_timeout_s()
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    leader = templates[0]
    assert leader["metadata"]["labels"]["role"] == service["spec"]["selector"]["role"] == "leader"
    (script,) = leader["spec"]["containers"][0]["args"]
    words = shlex.split(script.splitlines()[-1])
    assert words[:4] == ["exec", "vllm", "serve", "/model"]
    given = ServeArguments(*words[4:])
    assert given.value("--host") == "0.0.0.0"
    assert given.value("--tensor-parallel-size") == "8"
    assert given.value("--served-model-name") == made.model.name
    if size == 2:
        assert "ray start --head" in script
        (worker_script,) = templates[1]["spec"]["containers"][0]["args"]
        wait, join = worker_script.splitlines()
        assert shlex.split(wait)[:4] == ["until", "ray", "health-check", "--address"]
        assert join.split() == ["exec", "ray", "start", "--address=$(LWS_LEADER_ADDRESS):6379", "--block"]


def test_a_worker_that_starts_before_its_leader_waits_and_joins_once(tmp_path):
    """Run by a shell, with a ray that finds the leader at the third try; the set would start anew if it ended."""
    *_, workers = yaml.safe_load_all(render_lws(plan("pipeline")))
    container = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    (script,) = container["args"]
    (tmp_path / "ray").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$(wc -l < {tmp_path}/calls)" -ge 3 ]\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("ray", "sleep"):
        (tmp_path / name).chmod(0o755)
    # What Kubernetes puts in for the variable, and a search path with these two before all others.
    script = script.replace("$(LWS_LEADER_ADDRESS)", "leader")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run([*container["command"], script], env=environment, check=False, timeout=300).returncode == 0
    health = "health-check --address leader:6379"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [health, health, health, "start --address=leader:6379 --block"]


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "a_b/C.D e" * 20, "..."])
def test_names_are_such_as_kubernetes_takes(name):
    made = plan("replicas").replace(model=qwen3_30b_a3b(name=name))
    *_, workers = yaml.safe_load_all(render_lws(made))
    label = workers["metadata"]["name"]
    assert label == label.lower()
    assert 0 < len(label) <= 48
    assert label.replace("-", "").isalnum()
    assert label[-1] != "-"


@pytest.mark.parametrize("kind", ["replicas", "pipeline"])
def test_the_plan_is_a_block_that_can_be_read(kind):
    text = render_lws(plan(kind, wishes=resolve_wishes(["expert-load"], [])))
    assert "  plan.json: |\n" in text or "  plan.json: |-\n" in text
    assert '      "decisions": [\n' in text


@pytest.mark.parametrize("kind", ["replicas", "pipeline"])
def test_a_server_may_take_long_to_start_and_lives_while_it_gets_on(kind):
    made = plan(kind)
    *_, workers = yaml.safe_load_all(render_lws(made))
    template = workers["spec"]["leaderWorkerTemplate"]
    leader = template.get("leaderTemplate", template["workerTemplate"])["spec"]["containers"][0]
    start = leader["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] == 1800
    assert leader["readinessProbe"]["httpGet"]["path"] == "/health"
    *_, module, port = leader["livenessProbe"]["exec"]["command"]
    assert importlib.util.find_spec(module) is not None
    assert int(port) == leader["ports"][0]["containerPort"]
    if kind == "pipeline":
        assert "livenessProbe" not in template["workerTemplate"]["spec"]["containers"][0]


def documents(made: Plan) -> dict[str, list[dict[str, Any]]]:
    """Return what is rendered, by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for document in yaml.safe_load_all(render_lws(made)):
        found.setdefault(document["kind"], []).append(document)
    return found


@pytest.mark.parametrize(("layout", "prefill", "decode"), [("tp8p1d1", 1, 1), ("tp4p1d3", 1, 3), ("tp2p4d4", 4, 4)])
def test_servers_apart_are_a_set_of_each_kind_and_the_router_names_every_pod_once(layout, prefill, decode):
    made = plan("apart", layout=layout)
    found = documents(made)
    sets = {each["metadata"]["name"]: each["spec"] for each in found["LeaderWorkerSet"]}
    assert [spec["replicas"] for spec in sets.values()] == [prefill, decode]
    assert [spec["leaderWorkerTemplate"]["size"] for spec in sets.values()] == [1, 1]
    (router,) = found["Deployment"]
    (container,) = router["spec"]["template"]["spec"]["containers"]
    given = ServeArguments(*container["command"][1:])
    urls = [(each.flag, each.value) for each in given.arguments if each.flag in ("--prefill", "--decode")]
    # A set makes a headless service of its own name, in which the leader of a group has the name of its pod.
    pods = [
        (kind, f"http://{name}-{index}.{name}:8000")
        for kind, (name, spec) in zip(("--prefill", "--decode"), sets.items(), strict=True)
        for index in range(spec["replicas"])
    ]
    assert urls == pods
    assert not re.search("ADDRESS|127.0.0.1", " ".join(container["command"]))


def test_the_service_of_servers_apart_is_before_the_router():
    found = documents(plan("apart"))
    (service,), (router,) = found["Service"], found["Deployment"]
    labels = router["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == router["spec"]["selector"]["matchLabels"] == labels
    (container,) = router["spec"]["template"]["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    assert container["ports"] == [{"containerPort": port["targetPort"]}]
    assert router["spec"]["replicas"] == 1


def test_a_pod_of_servers_apart_has_its_gpus_its_part_and_its_own_address():
    made = plan("apart")
    roles = {}
    for each in documents(made)["LeaderWorkerSet"]:
        (container,) = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
        environment = {variable["name"]: variable for variable in container["env"]}
        assert "CUDA_VISIBLE_DEVICES" not in environment
        address = environment["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert address == "status.podIP"
        words = shlex.split(container["args"][0].splitlines()[-1])
        given = ServeArguments(*words[4:])
        assert (given.value("--host"), given.value("--port")) == ("0.0.0.0", "8000")
        transfer = json.loads(given.value("--kv-transfer-config") or "")
        roles[each["metadata"]["name"].rpartition("-")[2]] = transfer["kv_role"]
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}


@pytest.mark.parametrize("kind", ["replicas", "apart", "pipeline", "copies"])
def test_nothing_is_said_by_reference_to_another_place(kind):
    assert not re.search(r"[&*]id\d", render_lws(plan(kind)))


@pytest.mark.parametrize("kind", ["replicas", "apart", "pipeline", "copies"])
def test_no_service_has_the_name_of_a_set_which_makes_one_of_that_name_itself(kind):
    found = documents(plan(kind))
    names = [{each["metadata"]["name"] for each in found[one]} for one in ("Service", "LeaderWorkerSet")]
    assert names[0].isdisjoint(names[1])
