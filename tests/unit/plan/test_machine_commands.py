"""The commands that start a plan on each of several machines."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess

import pytest
import yaml

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.leader_worker_set import render_lws
from moe_optimizer.plan.machine_commands import render_machines
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import deepseek_v3, gpus, made_plan, profile_with, qwen3_30b_a3b
from tests.unit.plan.several_machines import plan


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
    profile = profile_with(passes={"parallelism": {"across_nodes": "pipeline"}})
    made = made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 8), profile, num_nodes=2, num_gpus=16)
    assert re.fullmatch("TP=8.* PP=2", made.decision("parallelism").value)


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


def test_pipelines_of_a_part_of_the_machines_are_groups_of_them_each_with_ray_of_its_own():
    made = plan("pipeline", num_nodes=4, num_gpus=32, layout="tp8pp2x2")
    assert (made.parallelism.machines_of_server, made.parallelism.replicas, made.num_gpus) == (2, 2, 32)
    text = render_machines(made)
    assert "The 4 machines are 2 groups of 2" in " ".join(text.replace("#", "").split())
    assert "`ray status` shows 16 GPUs" in text
    assert "On the other machine" in text
    *_, workers = yaml.safe_load_all(render_lws(made))
    assert (workers["spec"]["replicas"], workers["spec"]["leaderWorkerTemplate"]["size"]) == (2, 2)


def test_the_ray_commands_start_ray_everywhere_and_the_server_once():
    lines = [line for line in render_machines(plan("pipeline")).splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    assert text.count("ray start --head ") == 1
    assert text.count("ray start --address=HEAD:6379 ") == 1
    assert text.count("vllm serve ") == 1
    assert text.index("ray start --head") < text.index("ray start --address") < text.index("vllm serve")
    command = shlex.split(text[text.index("vllm serve") :].replace("\\\n", " "))
    planned = plan("pipeline").serve_args.words
    assert planned[planned.index("--host") + 1] == "127.0.0.1"
    assert command[3:] == ["HEAD" if word == "127.0.0.1" else word for word in planned]


@pytest.mark.parametrize("kind", ["replicas", "pipeline", "copies", "apart"])
def test_a_host_of_the_users_stays_where_requests_are_taken(kind):
    text = render_machines(plan(kind, host="0.0.0.0"))
    assert "--host 0.0.0.0" in text
    assert ("--host ADDRESS_0" in text) is (kind == "apart")
    assert "--host HEAD" not in text


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


@pytest.mark.parametrize("kind", ["replicas", "apart", "pipeline", "copies"])
def test_lines_fit_a_terminal(kind):
    lines = render_machines(plan(kind)).splitlines()
    # The configuration of a connector is one word.
    assert max(len(line) for line in lines if "kv_connector" not in line) <= 78


def machines_of(text: str) -> list[list[str]]:
    """Return the words of each machine's part of a rendering, and of the router's."""
    parts = re.split(r"(?m)^# (?:On machine \d|Beside them)", text)[1:]
    return [shlex.split(part.replace("\\\n", " "), comments=True) for part in parts]


@pytest.mark.parametrize("layout", ["tp8p1d1", "tp4p2d2", "tp4p1d3", "tp2p3d5"])
def test_each_machine_starts_its_servers_for_prompts_and_answers(layout):
    made = plan("apart", layout=layout)
    assert made.group is not None
    *machines, _ = machines_of(render_machines(made))
    assert len(machines) == 2
    for number, words in enumerate(machines):
        servers = [server for server in made.group.servers if server.machine == number]
        starts = [index for index, word in enumerate(words) if word == "vllm"]
        assert len(starts) == len(servers)
        for index, server in zip(starts, servers, strict=True):
            environment = {f"{key}={value}" for key, value in server.serve_env.items()}
            environment.add(f"CUDA_VISIBLE_DEVICES={','.join(map(str, server.gpus))}")
            assert set(words[index - len(environment) : index]) == environment
            given = words[index + 3 : index + 3 + len(server.serve_args.words)]
            assert ServeArguments(*given) == server.serve_args
        assert words.count("&") == len(servers)
        assert "ray" not in words


def test_the_router_is_started_once_and_told_of_every_server():
    made = plan("apart")
    assert made.group is not None
    text = render_machines(made)
    assert text.count("vllm-router \\") == 1
    *_, words = machines_of(text)
    given = ServeArguments(*words[words.index("vllm-router") + 1 :])
    urls = [(each.flag, each.value) for each in given.arguments if each.flag in ("--prefill", "--decode")]
    assert urls == [(f"--{server.name.partition('-')[0]}", server.url) for server in made.group.servers]
    assert (given.value("--host"), given.value("--port")) == ("ADDRESS_0", "8000")


def test_the_commands_for_servers_apart_run_in_a_shell(tmp_path):
    """With a vllm and a router that write down what they are given, each in a file of its own."""
    made = plan("apart")
    for name in ("vllm", "vllm-router"):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho "$VLLM_NIXL_SIDE_CHANNEL_PORT $*" > {tmp_path}/{name}-$$.given\n'
        )
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["sh", "-e", "-c", render_machines(made)], env=environment, check=True, timeout=300)
    given = [path.read_text() for path in tmp_path.glob("vllm-[0-9]*.given")]
    assert made.group is not None
    assert len(given) == len(made.group.servers)
    assert {line.split()[0] for line in given} == {"8100", "8200"}
    assert len(list(tmp_path.glob("vllm-router-*.given"))) == 1
