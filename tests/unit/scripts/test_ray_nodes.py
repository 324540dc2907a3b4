"""The commands that are printed for a start by Ray, as the script that runs them on one host takes them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_optimizer.plan.machine_commands import render_machines
from tests.builders import gpus, made_plan, qwen3_30b_a3b, software

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import ray_nodes


def printed(count: int) -> str:
    installed = software("cuda", cuda_ops=("fused_experts",))
    machines = {"num_nodes": count, "num_gpus": count, "layout": f"tp1pp{count}"}
    return render_machines(made_plan(qwen3_30b_a3b(), gpus("h100_sxm", 1), software=installed, **machines))


@pytest.mark.parametrize("count", [2, 3])
def test_they_are_those_of_the_first_machine_of_the_others_and_of_the_server(count, tmp_path):
    head, other, serve = (
        ray_nodes.substituted(block, "10.0.0.1", tmp_path) for block in ray_nodes.blocks(printed(count))
    )
    assert re.search(r"^ray start --head --node-ip-address=10\.0\.0\.1 ", head, re.MULTILINE)
    assert re.search(r"^ray start --address=10\.0\.0\.1:6379 --node-ip-address=10\.0\.0\.1$", other, re.MULTILINE)
    assert serve.startswith("vllm serve ")
    for block in (head, other, serve):
        assert not re.search(r"\b(HEAD|ADDRESS|RUN_DIR)\b", block)
        subprocess.run(["sh", "-n"], input=block, text=True, check=True, timeout=60)


def test_other_text_is_refused():
    with pytest.raises(ray_nodes.NodesError, match="1 blocks"):
        ray_nodes.blocks("# On each machine:\nvllm serve model\n")


def test_a_node_that_does_not_start_ends_the_run_with_its_log(tmp_path, monkeypatch, capsys):
    (tmp_path / "ray").write_text("#!/bin/sh\necho no port is free >&2\nexit 3\n")
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["ray_nodes.py", "examples/tiny-moe", "--", "--hardware", "h100_sxm"])
    assert ray_nodes.main() == 1
    said = capsys.readouterr().err
    assert "node-0" in said
    assert "no port is free" in said
