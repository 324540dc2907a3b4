"""The published commands, options and exit codes. A change here is a change for every user."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from moe_optimizer.cli.app import make_app
from moe_optimizer.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"

COMMON = {"--json", "--verbose", "--help"}
MODEL = {"MODEL", "--model", "--trust-remote-code"}
SWITCHED = (
    "parallelism", "expert-parallel", "fp8", "four-bit", "sparsity", "flash-dmoe", "expert-load", "expert-placement",
    "tuned-configs", "graph-capture", "scheduler", "kv-cache", "kv-tiering", "disaggregation", "replicas",
    "dual-batch-overlap", "speculation", "norm-rope-fusion", "skinny-gemm",
)  # fmt: skip
PLAN = MODEL | {
    "--gpus", "--profile", "--batch-size", "--max-model-len", "--dtype", "--host", "--port", "--engine", "--hardware",
    "--expert-load", "--expert-load-check", "--require", "--strict", "--show-config",
    "--layout", "--input-tokens", "--output-tokens",
    *(f"--enable-{name}" for name in SWITCHED),
    *(f"--disable-{name}" for name in SWITCHED),
}  # fmt: skip
AIM = {"--goal", "--clients", "--ttft", "--tpot"}
SURFACE = {
    "serve": COMMON
    | PLAN
    | AIM
    | {
        "--plan", "--dry-run", "--run-dir", "--ready-timeout", "--stall-timeout", "--restart", "--calibrate",
        "--no-decode-check", "--no-warm-up",
    },
    "inspect": COMMON | MODEL,
    "plan": COMMON | PLAN | AIM | {"--explain", "--nodes", "--render"},
    "bench": COMMON | PLAN | {
        "--plan", "--against", "--workload", "--clients", "--rates", "--requests-per-client", "--repetitions",
        "--ttft", "--tpot", "--tokenizer", "--run-dir", "--resume", "--ready-timeout", "--calibrate", "--html",
        "--ablate",
    },
    "compare": COMMON | {"A", "B", "--allow-different"},
    "report": COMMON | {"SOURCE...", "--html"},
    "quality": COMMON | PLAN | {
        "--plan", "--against", "--per-pass", "--data", "--tokens", "--prompts", "--tasks", "--task-limit",
        "--task-data", "--run-dir",
        "--resume",
        "--ready-timeout", "--calibrate",
    },
    "tune": COMMON | PLAN | {
        "--goal", "--budget", "--only", "--workload", "--clients", "--rates", "--requests-per-client", "--repetitions",
        "--seed", "--run-dir", "--resume", "--ready-timeout", "--calibrate", "--tokens", "--folder",
    },
    "doctor": COMMON | {"MODEL", "--model", "--drift"},
    "experts": COMMON | {"SOURCE", "--png", "--top"},
    "top": COMMON | {"SOURCE", "--interval", "--once"},
    "build": COMMON | {"--check"},
    "measure": {"--help"},
    "debug": {"--help"},
}  # fmt: skip
DEBUG = {
    "compare": COMMON | MODEL | {"--layer"},
    "oracle": COMMON | MODEL | {"--url", "--tolerance"},
    "generations": COMMON | MODEL | {"--save", "--against"},
}
MEASURE_TEXT = COMMON | MODEL | {"--text", "--output", "--max-tokens"}
MEASURE = {
    "speeds": COMMON | PLAN | {"--budget"},
    "links": COMMON | {"--gpus"},
    "step": COMMON | PLAN | {"--batches", "--context", "--steps", "--timeout"},
    "fp8-sensitivity": MEASURE_TEXT | {"--granularity"},
    "four-bit-sensitivity": MEASURE_TEXT | {"--format", "--group"},
    "activation-norms": MEASURE_TEXT,
}


def root() -> Any:
    return typer.main.get_command(make_app())


def options_of(command: Any) -> set[str]:
    names = {"--help"}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            names.add(parameter.metavar)
        names.update(name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-"))
    return names


def test_the_commands_are_the_published_ones() -> None:
    assert list(root().commands) == list(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_the_options_are_the_published_ones(name: str) -> None:
    assert options_of(root().commands[name]) == SURFACE[name]


@pytest.mark.parametrize("name", MEASURE)
def test_the_options_of_measure_are_the_published_ones(name: str) -> None:
    commands = root().commands["measure"].commands
    assert list(commands) == list(MEASURE)
    assert options_of(commands[name]) == MEASURE[name]


@pytest.mark.parametrize("name", DEBUG)
def test_the_options_of_debug_are_the_published_ones(name: str) -> None:
    commands = root().commands["debug"].commands
    assert list(commands) == list(DEBUG)
    assert options_of(commands[name]) == DEBUG[name]


def test_the_exit_codes_are_the_published_ones() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0, "BUG": 1, "BAD_INPUT": 2, "UNSUPPORTED": 3, "GOAL_MISSED": 4, "QUALITY_FAILED": 5,
        "NOT_APPLIED": 6, "SERVER_FAILED": 7,
    }  # fmt: skip


@pytest.mark.parametrize("name", [None, *SURFACE])
def test_help_fits_eighty_columns_and_has_no_colours(name: str | None, tmp_path: Path, run_command: Any) -> None:
    arguments = [name, "--help"] if name else ["--help"]
    finished = run_command(arguments, program=("-m", "moe_optimizer"), cwd=tmp_path, fresh=name is None)
    assert (finished.code, finished.stderr) == (0, "")
    assert max(map(len, finished.stdout.splitlines())) <= 80
    assert "\x1b" not in finished.stdout


def test_run_optimizer_is_the_serve_command(tmp_path: Path, run_command: Any) -> None:
    script = run_command(["--help"], cwd=tmp_path).stdout
    command = run_command(["serve", "--help"], program=("-m", "moe_optimizer"), cwd=tmp_path).stdout
    assert script.split()[:2] == ["Usage:", "run_optimizer.py"]
    assert script.partition("\n")[2] == command.partition("\n")[2]


def test_no_argument_shows_the_help(tmp_path: Path, run_command: Any) -> None:
    finished = run_command([], program=("-m", "moe_optimizer"), cwd=tmp_path)
    assert finished.code == 0
    assert "Commands:" in finished.stdout


def test_the_version_goes_to_stdout(tmp_path: Path, run_command: Any) -> None:
    finished = run_command(["--version"], program=("-m", "moe_optimizer"), cwd=tmp_path, fresh=True)
    assert (finished.code, finished.stderr) == (0, "")
    assert re.fullmatch(r"moe-optimizer \d+\.\d+\.\d+\n", finished.stdout)


def test_a_mistyped_command_names_the_nearest(tmp_path: Path, run_command: Any) -> None:
    finished = run_command(["srve"], program=("-m", "moe_optimizer"), cwd=tmp_path)
    assert finished.code == ExitCode.BAD_INPUT
    assert finished.first_line.startswith("error: ")
    assert "'srve'" in finished.first_line
    (hint,) = finished.hints
    assert "serve" in hint


@pytest.mark.parametrize("name", ["inspect", "doctor", "build"])
def test_only_serve_and_plan_take_vllms_arguments(name: str, tmp_path: Path, run_command: Any) -> None:
    finished = run_command([name, "--", "--seed", "1"], program=("-m", "moe_optimizer"), cwd=tmp_path)
    assert finished.code == ExitCode.BAD_INPUT
    assert finished.first_line.startswith("error: ")
    assert name in finished.first_line


def test_arguments_after_the_separator_reach_the_vllm_command(tmp_path: Path, run_command: Any) -> None:
    arguments = ["--model", str(TINY_MOE), "--dry-run", "--json", "--", "--seed", "7"]
    finished = run_command(arguments, cwd=tmp_path)
    assert finished.code == 0, finished
    assert '"--seed",' in finished.stdout


@pytest.mark.parametrize("arguments", [["--dry-run"], ["--dry-run", "--json"], ["--show-config"]])
def test_data_goes_to_stdout_and_nothing_else_does(arguments: list[str], tmp_path: Path, run_command: Any) -> None:
    finished = run_command(["--model", str(TINY_MOE), *arguments], cwd=tmp_path, fresh=arguments == ["--dry-run"])
    assert finished.code == 0, finished
    assert finished.stdout
    assert "warning:" not in finished.stdout
    assert all(line.startswith("warning: ") for line in finished.stderr.splitlines())
    assert "\x1b" not in finished.stdout + finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_quiet(tmp_path: Path, run_command: Any) -> None:
    # The reader ends at once, before the command has written anything.
    script = (
        "import subprocess, sys\n"
        "reader = subprocess.Popen(['true'], stdin=subprocess.PIPE)\n"
        "reader.wait()\n"
        "command = [sys.executable, '-m', 'moe_optimizer', 'plan', *sys.argv[1:], '--json']\n"
        "sys.exit(subprocess.run(command, stdout=reader.stdin).returncode)\n"
    )
    finished = run_command([str(TINY_MOE)], program=("-c", script), cwd=tmp_path)
    assert finished.code == 141
    assert "Traceback" not in finished.stderr
    assert "Broken" not in finished.stderr


@pytest.mark.parametrize("arguments", [["inspect", str(TINY_MOE)], ["--help"]])
def test_a_full_disk_under_stdout_is_an_error_with_a_hint(
    arguments: list[str], tmp_path: Path, run_command: Any
) -> None:
    program = ("-c", "import os, sys; os.execv('/bin/sh', ['sh', '-c', *sys.argv[1:]])")
    line = 'exec "$0" -m moe_optimizer "$@" >/dev/full'
    finished = run_command([line, sys.executable, *arguments], program=program, cwd=tmp_path)
    assert finished.code == ExitCode.BAD_INPUT, finished
    assert finished.first_line.startswith("error: ")
    assert os.strerror(errno.ENOSPC) in finished.first_line
    assert len(finished.hints) == 1
    assert "Traceback" not in finished.stderr


def test_a_full_disk_under_stderr_leaves_the_exit_code(tmp_path: Path, run_command: Any) -> None:
    program = ("-c", "import os, sys; os.execv('/bin/sh', ['sh', '-c', *sys.argv[1:]])")
    line = 'exec "$0" -m moe_optimizer inspect ./none 2>/dev/full'
    assert run_command([line, sys.executable], program=program, cwd=tmp_path).code == ExitCode.BAD_INPUT


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("model", "code"), [(str(TINY_MOE), 0), ("./none", 2)])
def test_a_stream_closed_from_the_start_changes_nothing_else(
    stream: str, model: str, code: int, tmp_path: Path, run_command: Any
) -> None:
    descriptor = {"stdout": 1, "stderr": 2}[stream]
    program = ("-c", "import os, sys; os.execv('/bin/sh', ['sh', '-c', *sys.argv[1:]])")
    line = f'exec "$0" -m moe_optimizer inspect "$1" {descriptor}>&-'
    finished = run_command([line, sys.executable, model], program=program, cwd=tmp_path)
    assert finished.code == code, finished
    assert "Traceback" not in finished.stderr + finished.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_offers_the_commands(shell: str, tmp_path: Path, run_command: Any) -> None:
    environ = {
        "_MOE_OPTIMIZER_COMPLETE": f"complete_{shell}", "COMP_WORDS": "moe-optimizer ins", "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "moe-optimizer ins", "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    finished = run_command([], program=("-m", "moe_optimizer"), cwd=tmp_path, env=environ, fresh=shell == "bash")
    assert finished.code == 0, finished
    assert "inspect" in finished.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("serve --profile b", "balanced"),
        ("plan --hardware h20", "h200"),
        ("serve --engine e", "embedded"),
        ("serve --require fl", "flash-dmoe"),
        ("serve --enable-fl", "--enable-flash-dmoe"),
    ],
)
def test_shell_completion_offers_values(words: str, offered: str, tmp_path: Path, run_command: Any) -> None:
    environ = {
        "_MOE_OPTIMIZER_COMPLETE": "complete_bash", "COMP_WORDS": f"moe-optimizer {words}",
        "COMP_CWORD": str(len(words.split())),
    }  # fmt: skip
    finished = run_command([], program=("-m", "moe_optimizer"), cwd=tmp_path, env=environ)
    assert finished.stdout.split() == [offered]
