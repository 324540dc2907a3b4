"""`bench`, `quality` and `tune` refuse what they can before they measure or start anything."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode
from moe_optimizer.measure.bench import run
from moe_optimizer.measure.kernel_speeds import tables
from tests.free_ports import free_ports

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
COMMANDS = ("bench", "quality", "tune")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What was measured or started; nothing really is, and no table of this machine answers a question of a plan."""
    seen: list[Any] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "measure_speeds", lambda asked, **_: seen.append(asked))
    monkeypatch.setattr(run, "starting", lambda side, **_: seen.append(side))
    return seen


@pytest.fixture
def refused(measured: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs a command line; returns what its error says once nothing was measured for it and nothing is left of it."""

    def check(*arguments: str, port: int | None = None) -> str:
        before = sorted(tmp_path.rglob("*"))
        where = ["--port", str(port or free_ports(4))]
        assert main([arguments[0], TINY_MOE, *where, *arguments[1:]]) == ExitCode.BAD_INPUT
        assert measured == []
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().err.splitlines()[0]

    return check


@pytest.mark.parametrize("command", ["bench", "quality"])
@pytest.mark.parametrize("name", ["balancd", "absent.json", "absent.yaml", "http://127.0.0.1:9"])
def test_a_name_that_means_no_side(command: str, name: str, refused: Callable[..., str]) -> None:
    assert name in refused(command, "--against", name)


@pytest.mark.parametrize("command", ["bench", "quality"])
@pytest.mark.parametrize("flag", ["--plan", "--against"])
def test_a_plan_of_another_model(
    command: str, flag: str, refused: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", TINY_MOE, "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    plan["model"] |= {"name": "another", "path": "/another"}
    file = tmp_path / "other.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    assert "another" in refused(command, flag, str(file))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_of_either_side_that_is_taken(command: str, offset: int, refused: Callable[..., str]) -> None:
    port = free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + offset))
        taken.listen()
        assert str(port + offset) in refused(command, port=port)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_place_of_the_run_folder(command: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert str(tmp_path / "file") in refused(command, "--run-dir", str(tmp_path / "file"))


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_workload_that_there_is_not(command: str, refused: Callable[..., str]) -> None:
    assert "decod" in refused(command, "--workload", "decod")


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_requests_that_are_longer_than_a_side_takes(command: str, refused: Callable[..., str]) -> None:
    assert "long_context" in refused(command, "--workload", "long_context")


def test_a_goal_that_is_none(refused: Callable[..., str]) -> None:
    assert "fast" in refused("tune", "--goal", "fast")
