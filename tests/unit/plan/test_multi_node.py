"""What starts a plan on several machines: Ray commands and a LeaderWorkerSet."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.multi_node import render_lws, render_machines
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.specs.model import ModelSpec
from tests.builders import deepseek_v3, gpus, made_plan, qwen3_30b_a3b


def bf16_deepseek() -> ModelSpec:
    model = deepseek_v3()
    stored = {"weight_bytes": 2 * model.total_params, "expert_weight_bytes": 2 * model.expert_params}
    return dataclasses.replace(
        model, quant_method=None, weights_are_fp8=False, weight_bits=16.0, weight_block=None, **stored
    )


_PINNED = {"replicas": "tp8x2", "copies": "tp2dp8ep", "pipeline": "tp8pp2"}


def plan(kind: str, **changes: Any) -> Plan:
    model, machine = (qwen3_30b_a3b(), "h100_sxm") if kind == "replicas" else (bf16_deepseek(), "h200")
    pinned = {"layout": _PINNED[kind]} if kind in _PINNED and not changes.get("one_server") else {}
    fields = {"num_nodes": 2, "num_gpus": 16, **pinned, **changes}
    return made_plan(model, gpus(machine, 8), "balanced", **fields)


def test_a_model_that_one_machine_holds_is_served_whole_on_each():
    made = plan("replicas")
    decision = made.decision("parallelism")
    assert (made.parallelism.replicas, made.parallelism.pipeline_parallel_size) == (2, 1)
    assert re.fullmatch("TP=8.* 2 machines", decision.value)
    assert (made.num_gpus, made.num_nodes) == (16, 2)
    assert made.serve_args.value("--pipeline-parallel-size") is None


def test_a_model_that_one_machine_does_not_hold_is_divided_by_layers():
    made = plan("pipeline")
    assert (made.parallelism.replicas, made.parallelism.pipeline_parallel_size) == (1, 2)
    assert made.serve_args.value("--pipeline-parallel-size") == "2"
    assert made.serve_args.value("--distributed-executor-backend") == "ray"
    weights = 2 * deepseek_v3().total_params
    assert weights / 16 < made.memory.weight_bytes < 1.1 * weights / 16


def test_one_server_can_be_asked_for():
    assert re.fullmatch("TP=8.* PP=2", plan("replicas", one_server=True).decision("parallelism").value)


def commands(text: str) -> list[list[str]]:
    """Return the words of each `vllm serve` of a rendering."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("vllm serve")]


def test_copies_over_machines_are_one_server_of_which_each_machine_starts_its_own():
    made = plan("copies")
    split = made.parallelism
    assert (split.machines_of_copies, split.replicas, made.num_gpus) == (2, 1, 16)
    first, other = (ServeArguments(*words[3:]) for words in commands(render_machines(made)))
    for given in (first, other):
        assert (given.count("--data-parallel-size"), given.count("--data-parallel-size-local")) == (8, 4)
        assert given.value("--data-parallel-address") == "HEAD"
        assert given.is_on("--enable-expert-parallel")
    assert "--headless" not in first
    assert other.is_on("--headless")
    assert other.value("--data-parallel-start-rank") == "4"
    assert "ray" not in render_machines(made).lower().replace("no ray", "")


def test_several_servers_of_several_machines_are_groups_of_them():
    made = plan("copies", num_nodes=8, num_gpus=64, layout="tp2dp16epx2")
    assert (made.parallelism.machines_of_copies, made.parallelism.replicas, made.num_gpus) == (4, 2, 64)
    text = render_machines(made)
    assert "2 groups of 4" in " ".join(text.replace("#", "").split())
    assert "--data-parallel-start-rank $((MACHINE * 4))" in text
    *_, workers = yaml.safe_load_all(render_lws(made))
    assert (workers["spec"]["replicas"], workers["spec"]["leaderWorkerTemplate"]["size"]) == (2, 4)


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


def test_the_ray_commands_start_ray_everywhere_and_the_server_once():
    lines = [line for line in render_machines(plan("pipeline")).splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    assert text.count("ray start --head ") == 1
    assert text.count("ray start --address=HEAD:6379 ") == 1
    assert text.count("vllm serve ") == 1
    assert text.index("ray start --head") < text.index("ray start --address") < text.index("vllm serve")
    command = shlex.split(text[text.index("vllm serve") :].replace("\\\n", " "))
    assert tuple(command[3:]) == plan("pipeline").serve_args.words


def test_files_that_the_servers_read_are_named_with_their_folder():
    made = plan("replicas")
    tuned = dataclasses.replace(
        made.decision("tuned_configs"),
        status=Status.ON, applier=Applier.FILES, env={"VLLM_TUNED_CONFIG_FOLDER": "/tuned"},
    )  # fmt: skip
    decisions = tuple(tuned if each.pass_name == "tuned_configs" else each for each in made.decisions)
    made = made.replace(decisions=decisions, serve_env={**made.serve_env, **tuned.env})
    assert any(re.match("# tuned_configs.* /tuned ", line) for line in render_machines(made).splitlines())
    assert any(re.match("# tuned_configs.* image.*/tuned", line) for line in render_lws(made).splitlines())
    assert "tuned_configs lies" not in render_machines(plan("replicas")) + render_lws(plan("replicas"))


@pytest.mark.parametrize("kind", ["replicas", "pipeline"])
def test_the_plan_travels_to_every_machine_whose_servers_read_it(kind):
    made = plan(kind, wishes=resolve_wishes(["expert-load"], []))
    assert made.decision("expert_load").applier is Applier.PLUGIN
    text = render_machines(made)
    assert text.count("export MOE_OPTIMIZER_PLAN=RUN_DIR/plan.json") == made.parallelism.pipeline_parallel_size
    assert "RUN_DIR/plan.json on every " in " ".join(text.replace("#", "").split())
    config, _, workers = yaml.safe_load_all(render_lws(made))
    assert Plan.from_json(config["data"]["plan.json"], origin="ConfigMap").digest == made.digest
    group = workers["spec"]["leaderWorkerTemplate"]
    for template in (group[key] for key in ("leaderTemplate", "workerTemplate") if key in group):
        (container,) = template["spec"]["containers"]
        (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "plan"]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "plan"]
        (read,) = [each["value"] for each in container["env"] if each["name"] == "MOE_OPTIMIZER_PLAN"]
        # The proofs go beside the plan, so it must lie where a server can write.
        folder = read.removesuffix("/plan.json")
        made_folder, copied = container["args"][0].splitlines()[0].split(" && ")
        assert shlex.split(made_folder) == ["mkdir", "-p", folder]
        assert shlex.split(copied) == ["cp", f"{mount['mountPath']}/plan.json", f"{folder}/"]


def test_without_a_part_in_the_plugin_no_plan_travels():
    made = plan("replicas", wishes=resolve_wishes([], ["expert-load"]))
    assert "MOE_OPTIMIZER_PLAN" not in render_machines(made) + render_lws(made)


def test_servers_that_share_a_machine_have_gpus_and_a_port_each():
    made = plan("replicas", layout="tp4x4")
    assert (made.parallelism.replicas, made.num_nodes, made.num_gpus) == (4, 2, 16)
    text = render_machines(made).replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if "vllm serve" in line]
    assert [command[0] for command in commands] == ["CUDA_VISIBLE_DEVICES=0,1,2,3", "CUDA_VISIBLE_DEVICES=4,5,6,7"]
    assert [command[command.index("--port") + 1] for command in commands] == ["8000", "8001"]
    *_, workers = yaml.safe_load_all(render_lws(made))
    assert workers["spec"]["replicas"] == 4
    (container,) = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_replicas_need_no_ray():
    text = render_machines(plan("replicas"))
    assert "ray start" not in text
    assert "--host ADDRESS" in text


@pytest.mark.parametrize("kind", ["replicas", "pipeline", "copies"])
def test_lines_fit_a_terminal(kind):
    assert max(map(len, render_machines(plan(kind)).splitlines())) <= 78


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
    assert 0 < len(label) <= 50
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
