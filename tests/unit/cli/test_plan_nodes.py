"""Planning for several machines on the command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.specs.layout import parse_layout

MODEL_CONFIGS = Path(__file__).resolve().parents[2] / "data" / "model_configs"
TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
TWO = ["plan", TINY_MOE, "--hardware", "h100_sxm", "--gpus", "16", "--nodes", "2", "--disable-fp8"]


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--hardware", "h100_sxm", "--gpus", "16", "--nodes", "3"], "does not divide", ExitCode.BAD_INPUT),
        (["--hardware", "h100_sxm", "--nodes", "0"], "--nodes: got '0'", ExitCode.BAD_INPUT),
        (["--hardware", "h100_sxm", "--render", "yaml"], "--render: got 'yaml'", ExitCode.BAD_INPUT),
        (["--hardware", "h100_sxm", "--render", "lws", "--json"], "contradict", ExitCode.BAD_INPUT),
        (["--hardware", "h100_sxm", "--render", "ray"], "--nodes 2", ExitCode.BAD_INPUT),
        (
            ["--hardware", "h100_sxm", "--gpus", "2", "--enable-disaggregation", "--render", "lws"],
            "router",
            ExitCode.UNSUPPORTED,
        ),
        (["--hardware", "cpu", "--nodes", "2"], "several machines", ExitCode.UNSUPPORTED),
        (["--hardware", "cpu", "--render", "lws"], "several machines", ExitCode.UNSUPPORTED),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", TINY_MOE, *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err.partition("\n")[0]


def test_more_gpus_than_a_machine_has_name_the_machines_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY_MOE, "--hardware", "h100_sxm", "--gpus", "20"]) == ExitCode.OK
    shown = capsys.readouterr()
    assert " 8 x NVIDIA" in shown.out
    assert shown.err.startswith("warning: --gpus 20: ")
    assert "--gpus 21 --nodes 3" in shown.err


def test_the_plan_says_how_to_start_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TWO) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "16 of 16 x NVIDIA" in " ".join(shown.split())
    assert " 2 machines" in shown
    assert "--render ray" in shown
    assert "--render lws" in shown
    assert max(len(line) for line in shown.splitlines() if TINY_MOE not in line) <= 80


@pytest.mark.parametrize("pinned", [[], ["--layout", "tp1pp2"], ["--layout", "tp4x4"], ["--layout", "tp2dp8ep"]])
def test_what_is_rendered_for_ray_is_the_planned_layout(
    pinned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(MODEL_CONFIGS / "qwen3_moe.json", tmp_path / "config.json")
    gpus = "2" if "tp1pp2" in pinned else "16"
    asked = ["plan", str(tmp_path), "--hardware", "h100_sxm", "--gpus", gpus, "--nodes", "2", *pinned]
    assert main([*asked, "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    layout = parse_layout(plan["layouts"]["chosen"])
    assert main([*asked, "--render", "ray"]) == ExitCode.OK
    shown = capsys.readouterr().out
    commands = re.findall(r"^.*vllm serve \S+ (.*?)&?$", shown.replace("\\\n", " "), re.MULTILINE)
    served = [ServeArguments(*shlex.split(command)) for command in commands]
    assert served
    for arguments in served:
        assert (arguments.count("--tensor-parallel-size") or 1) == layout.tensor_parallel_size
        assert (arguments.count("--data-parallel-size") or 1) == layout.data_parallel_size
        assert (arguments.count("--pipeline-parallel-size") or 1) == layout.pipeline_parallel_size
        assert arguments.is_on("--enable-expert-parallel") is layout.expert_parallel
    within = layout.devices_of_server <= 8 and layout.pipeline_parallel_size == 1
    assert len(served) == (layout.replicas // 2 if within else 2 if layout.data_parallel_size > 1 else 1)
    assert ("ray start" in shown) is (layout.pipeline_parallel_size > 1)


def test_a_leader_worker_set_is_rendered_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--render", "lws"]) == ExitCode.OK
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds[-2:] == ["Service", "LeaderWorkerSet"]


def test_what_the_page_says_of_only_the_commands_prints_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With these limits prefill and decode are apart, which aggressive leaves to the search.
    load = ["--clients", "1024", "--input-tokens", "8000", "--output-tokens", "200", "--tpot", "25"]
    shutil.copy(MODEL_CONFIGS / "qwen3_moe.json", tmp_path / "config.json")
    asked = ["plan", str(tmp_path), *TWO[2:-1], *load, "--profile", "aggressive"]
    assert main(asked) == ExitCode.OK
    page = capsys.readouterr().out
    words = page.partition("Only the commands: ")[2].partition(".\n")[0]
    assert main([*asked, *words.split()]) == ExitCode.OK
    commands = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert commands.count("# decode-0") == 1
    assert [line.strip() for line in page.partition("\nCommands\n")[2].splitlines()][: len(commands)] == commands


def test_the_plan_beside_the_commands_is_the_one_that_they_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(MODEL_CONFIGS / "qwen3_moe.json", tmp_path / "config.json")
    asked = ["plan", str(tmp_path), *TWO[2:], "--enable-expert-load"]
    assert main([*asked, "--render", "ray"]) == ExitCode.OK
    shown = capsys.readouterr().out
    words = shown.replace("\n# ", " ").partition("the same command with ")[2].partition(" instead of --render")[0]
    assert main([*asked, *words.split()]) == ExitCode.OK
    served = json.loads(capsys.readouterr().out)["serve_args"]
    printed = shown.partition("vllm serve ")[2].partition(" &\n")[0].replace("\\\n", " ").split()
    assert served[served.index("--shutdown-timeout") :] == printed[printed.index("--shutdown-timeout") :]


@pytest.mark.parametrize("asked", [["--enable-disaggregation"], ["--layout", "tp1p2d14"]])
def test_prefill_and_decode_over_machines_are_shown_and_rendered(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for form in ([], ["--explain"], ["--json"], ["--render", "ray"], ["--render", "lws"]):
        assert main([*TWO, *asked, *form]) == ExitCode.OK
        shown[form[-1] if form else ""] = capsys.readouterr().out
    plan = json.loads(shown["--json"])
    servers = plan["group"]["servers"]
    assert {server["machine"] for server in servers} == {0, 1}
    assert plan["num_gpus"] == sum(len(server["gpus"]) for server in servers) == 16
    commands = shown["ray"]
    assert commands.count("vllm serve ") == len(servers)
    assert commands.count("vllm-router \\") == 1
    for page in (shown[""], shown["--explain"]):
        assert page.count("vllm serve ") == len(servers)
    kinds = [document["kind"] for document in yaml.safe_load_all(shown["lws"])]
    assert kinds[-4:] == ["Service", "LeaderWorkerSet", "LeaderWorkerSet", "Deployment"]


def test_the_plan_as_data_has_the_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_gpus"], plan["num_nodes"], plan["hardware"]["num_gpus"]) == (
        16,
        2,
        8,
    )  # copies take the GPUs that its four heads leave
