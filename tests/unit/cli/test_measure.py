"""The measure commands: what they refuse before vLLM is started, and what they ask of the measuring process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode, UnsupportedError
from moe_optimizer.inspection import hardware_probe
from moe_optimizer.measure import process
from moe_optimizer.measure.kernel_speeds import tables
from moe_optimizer.measure.links import tables as link_tables
from tests.builders import gpus

TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"
ON_TEXT = pytest.mark.parametrize("command", ["fp8-sensitivity", "four-bit-sensitivity", "activation-norms"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("def add(a, b):\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The (module, request) pairs that would have been measured; each answers with 9 tokens."""
    seen: list[Any] = []

    def run_measurement(module: str, request: Any, **_: Any) -> Any:
        seen.append((module, request))
        return {"tokens": 9, "errors": {"0": 0.02}} if module.endswith("sensitivity") else 9

    monkeypatch.setattr(process, "run_measurement", run_measurement)
    return seen


@ON_TEXT
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--max-tokens": "0"}, "--max-tokens: got '0'"),
        ({"--output": "absent/file"}, "no folder"),
        ({"--output": "."}, "got a folder"),
        ({"--output": ""}, "--output: is missing"),
        ({"--text": "absent.txt"}, "No such file"),
        ({"--text": "latin.txt"}, "not UTF-8"),
        ({"--text": "empty.txt"}, "empty"),
        ({"--model": "absent-model/"}, "absent-model"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_refused_before_vllm_is_started(
    command: str, changes: dict[str, str], said: str, text: Path, tmp_path: Path, asked: list[Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").touch()
    given = {"--model": str(TINY_MOE), "--text": str(text), "--output": "file", "--max-tokens": "9"} | changes
    assert main(["measure", command, *(word for pair in given.items() for word in pair)]) == ExitCode.BAD_INPUT
    assert said in capsys.readouterr().err.splitlines()[0]
    assert asked == []
    assert not (tmp_path / "file").exists()


@ON_TEXT
def test_a_model_without_experts_is_unsupported(
    command: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((TINY_MOE / "config.json").read_text(encoding="utf-8"))
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0, 1, 2, 3]}), encoding="utf-8")
    arguments = ["measure", command, str(dense), "--text", str(text), "--output", str(tmp_path / "file")]
    assert main(arguments) == ExitCode.UNSUPPORTED
    assert "no experts" in capsys.readouterr().err


@ON_TEXT
def test_the_process_is_asked_for_the_model_under_the_name_that_a_plan_gives_it(
    command: str, text: Path, tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(TINY_MOE)
    output = str(tmp_path / "file")
    assert main(["measure", command, ".", "--text", str(text), "--output", output]) == ExitCode.OK
    ((module, request),) = asked
    assert module.rpartition(".")[2] == ("layer_sensitivity" if "sensitivity" in command else "activation_norms")
    assert (request["name"], request["max_tokens"], request["output"]) == ("tiny-moe", 4096, output)
    assert re.search(rf"9 tokens.* {re.escape(str(output))}\n$", capsys.readouterr().out)


def test_the_granularity_is_one_of_two(
    text: Path, tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["measure", "fp8-sensitivity", str(TINY_MOE), "--text", str(text), "--output", str(tmp_path / "file")]
    assert main([*arguments, "--granularity", "row"]) == ExitCode.BAD_INPUT
    assert "block, channel" in capsys.readouterr().err
    assert main([*arguments, "--granularity", "channel", "--json"]) == ExitCode.OK
    assert asked[0][1]["weights"] == "fp8_channel"
    assert json.loads(capsys.readouterr().out)["tokens"] == 9


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ((), "mxfp4"),
        (("--format", "mxfp4", "--group", "32"), "mxfp4"),
        (("--format", "int4"), "int4_g32"),
        (("--format", "int4", "--group", "128"), "int4_g128"),
    ],
)
def test_four_bits_are_measured_in_the_format_and_groups_of_the_profile(
    options: tuple[str, ...], weights: str, text: Path, tmp_path: Path, asked: list[Any]
) -> None:
    command = ["measure", "four-bit-sensitivity", str(TINY_MOE), "--text", str(text), "--output", str(tmp_path / "f")]
    assert main([*command, *options]) == ExitCode.OK
    assert asked[0][1]["weights"] == weights


def test_mxfp4_has_no_other_groups(
    text: Path, tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["measure", "four-bit-sensitivity", str(TINY_MOE), "--text", str(text), "--output", str(tmp_path / "f")]
    assert main([*command, "--group", "64"]) == ExitCode.BAD_INPUT
    assert "--group 64" in capsys.readouterr().err
    assert asked == []


def test_a_subcommand_that_is_mistyped_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "sped"]) == ExitCode.BAD_INPUT
    assert " speeds?" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The requests for speeds; nothing is measured. The user's cache is empty, and this machine can serve."""
    seen: list[Any] = []
    monkeypatch.setattr(tables, "measure_speeds", lambda request, **_: seen.append(request))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("moe_optimizer.cli.preflight.check_can_serve_here", lambda plan, settings: None)
    return seen


def test_speeds_are_measured_where_no_table_answers(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", "speeds", str(TINY_MOE), "--enable-flash-dmoe", "--budget", "7"]
    assert main([*arguments, "--json"]) == ExitCode.OK
    (request,) = measured
    assert request.seconds == 7
    assert json.loads(capsys.readouterr().out)["measured"] is True


def test_a_machine_that_cannot_serve_is_refused_before_anything_is_measured(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(plan: Any, settings: Any) -> None:
        raise UnsupportedError("vLLM is not installed")

    monkeypatch.setattr("moe_optimizer.cli.preflight.check_can_serve_here", refuse)
    assert main(["measure", "speeds", str(TINY_MOE), "--enable-flash-dmoe"]) == ExitCode.UNSUPPORTED
    assert measured == []
    assert "not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "arguments", "groups"),
    [(8, (), (2, 4, 8)), (6, (), (2, 4, 6)), (8, ("--gpus", "3"), (2, 3)), (2, (), (2,))],
)
def test_links_are_measured_of_each_number_of_gpus_that_plans_take(
    there: int, arguments: tuple[str, ...], groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(hardware_probe, "probe_hardware", lambda: gpus("h200", there))
    monkeypatch.setattr(link_tables, "measure_links", lambda request, **_: seen.append(request) or ())
    assert main(["measure", "links", *arguments]) == ExitCode.OK
    (request,) = seen
    assert (request.device, request.name, request.groups) == ("cuda", "NVIDIA H200", groups)


@pytest.mark.parametrize(("there", "arguments"), [(1, ()), (2, ("--gpus", "4"))])
def test_links_of_fewer_gpus_than_it_takes_are_refused(
    there: int, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_probe, "probe_hardware", lambda: gpus("h200", there))
    assert main(["measure", "links", *arguments]) == ExitCode.UNSUPPORTED
