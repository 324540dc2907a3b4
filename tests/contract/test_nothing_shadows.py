"""A folder that holds torch.py, yaml.py or vllm.py is only a folder: no command that is started there executes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.launcher.command import server_command, server_environment
from moe_optimizer.launcher.router import router_command, router_environment
from moe_optimizer.measure.process import run_measurement
from moe_optimizer.plan.serve_args import ServeArguments
from tests import shadowing
from tests.builders import cpu_machine, made_plan, tiny_moe

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = str(ROOT / "examples" / "tiny-moe")
RUN_OPTIMIZER = (str(ROOT / "run_optimizer.py"),)
MOE_OPTIMIZER = ("-m", "moe_optimizer")
PLAN = made_plan(tiny_moe(), cpu_machine())

LOOK = f"""
import importlib.util, os
for name in {shadowing.NAMES!r}:
    found = importlib.util.find_spec(name)
    assert not (found and str(found.origin).startswith(os.getcwd())), found
import json, logging, tempfile, yaml
"""
# As vLLM starts its processes: by multiprocessing, and a Python of its own.
IMPORTS = f"""
import multiprocessing, subprocess, sys
if __name__ == "__main__":
    exec({LOOK!r})
    subprocess.run([sys.executable, "-c", {LOOK!r}], check=True)
    process = multiprocessing.get_context("spawn").Process(target=exec, args=({LOOK!r}, {{}}))
    process.start()
    process.join()
    assert process.exitcode == 0, "spawned"
"""


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (MOE_OPTIMIZER, ["inspect", TINY_MOE]),
        (MOE_OPTIMIZER, ["plan", TINY_MOE, "--hardware", "h100_sxm"]),
        pytest.param(MOE_OPTIMIZER, ["doctor"], marks=pytest.mark.thorough),
        (MOE_OPTIMIZER, ["build", "--check"]),
        # Ends before it starts servers and measuring processes, of which the tests below are: its folder is a file.
        pytest.param(MOE_OPTIMIZER, ["tune", TINY_MOE, "--run-dir", "torch.py"], marks=pytest.mark.thorough),
        (MOE_OPTIMIZER, ["experts", "http://127.0.0.1:1"]),
        (RUN_OPTIMIZER, [TINY_MOE, "--dry-run"]),
    ],
    ids=lambda value: value[0] if value[0] != "-m" else value[1],
)
def test_no_command_executes_what_lies_where_it_is_started(
    program: tuple[str, ...], arguments: list[str], tmp_path: Path, run_command: Any
) -> None:
    executed = shadowing.lay(tmp_path)
    finished = run_command(arguments, program=program, cwd=tmp_path, fresh=True)
    assert "Traceback" not in finished.stderr
    assert list(executed.iterdir()) == []


def test_an_empty_entry_of_the_path_is_not_the_current_folder(tmp_path: Path, run_command: Any) -> None:
    executed = shadowing.lay(tmp_path)
    # Those of the standard library Python itself imports from there, before the first line of ours.
    for name in ("json", "logging", "tempfile"):
        (tmp_path / f"{name}.py").unlink()
    path = {"PYTHONPATH": f"{ROOT}:"}
    run_command([TINY_MOE, "--dry-run"], cwd=tmp_path, fresh=True, program=RUN_OPTIMIZER, env=path)
    assert list(executed.iterdir()) == []


@pytest.mark.parametrize("path", [f"{ROOT}", f":{ROOT}", f"{ROOT}:"])
@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (server_command(PLAN, PLAN.serve_args), lambda environ: server_environment(PLAN, Path("plan.json"), environ)),
        (router_command(ServeArguments()), lambda environ: router_environment(Path("plan.json"), environ)),
    ],
    ids=["server", "router"],
)
def test_a_server_and_all_that_it_starts_import_nothing_from_the_folder(
    command: list[str], environment: Any, path: str, tmp_path: Path
) -> None:
    executed = shadowing.lay(tmp_path)
    interpreter = command[: command.index("-m")]
    done = subprocess.run(
        [*interpreter, "-c", IMPORTS], cwd=tmp_path, env=environment({"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(executed.iterdir()) == []


def test_a_measuring_process_imports_nothing_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = shadowing.lay(tmp_path / "here")
    (tmp_path / "programs").mkdir()
    answer = "    import os\n    os.write(int(sys.argv[2]), b'{\"result\": 1}\\n')\n"
    (tmp_path / "programs" / "program.py").write_text(IMPORTS + answer)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'programs'}:{ROOT}:")
    monkeypatch.chdir(tmp_path / "here")
    assert run_measurement("program", {}, on_step=lambda *_: None, log=tmp_path / "log") == 1
    assert list(executed.iterdir()) == []


def test_the_canaries_sing(tmp_path: Path) -> None:
    executed = shadowing.lay(tmp_path)
    subprocess.run([sys.executable, "-c", "import torch, yaml, json"], cwd=tmp_path, check=True)
    assert {path.name for path in executed.iterdir()} == {"torch", "yaml", "json"}
