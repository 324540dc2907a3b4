"""`bench`: what its options ask to be measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode, InputError
from moe_optimizer.launcher import launch
from moe_optimizer.measure.bench import run
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.side import STOCK

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchRequest]:
    """What would be measured; nothing is."""
    requests: list[BenchRequest] = []

    def note(request: BenchRequest, **_: object) -> None:
        requests.append(request)
        raise InputError("noted")

    monkeypatch.setattr(run, "run_bench", note)
    monkeypatch.setattr(launch, "check", lambda *_, **__: None)
    return requests


@pytest.mark.parametrize("wish", ["--enable-flash-dmoe", "--enable-expert-load", "--disable-flash-dmoe"])
def test_a_switch_is_a_wish_for_the_first_side_and_not_for_stock_vllm(wish: str, asked: list[BenchRequest]) -> None:
    main(["bench", TINY_MOE, wish, "--calibrate", "0"])
    ours, stock = asked[0].sides
    assert ours.plan is not None
    assert stock.plan is not None
    name = wish.removeprefix("--enable-").removeprefix("--disable-").replace("-", "_")
    assert ours.plan.decision(name).wish.value == ("on" if wish.startswith("--enable") else "off")
    assert (stock.name, stock.passes) == (STOCK, ())
    assert not stock.plan.plugin_decisions


def test_two_plans_of_files_that_name_one_port_listen_on_two(
    asked: list[BenchRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", TINY_MOE, "--port", "8123", "--json"]) == ExitCode.OK
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(capsys.readouterr().out or (tmp_path / "a.json").read_text(), encoding="utf-8")
    main(["bench", TINY_MOE, "--plan", str(tmp_path / "a.json"), "--against", str(tmp_path / "b.json")])
    ports = [side.plan.serve_args.value("--port") for side in asked[0].sides if side.plan is not None]
    assert ports == ["8123", "8124"]


def test_what_must_run_must_run_on_the_first_side_alone(asked: list[BenchRequest]) -> None:
    main(["bench", TINY_MOE, "--require", "expert_load", "--strict", "--calibrate", "0"])
    ours, stock = asked[0].sides
    assert ours.plan is not None
    assert stock.plan is not None
    assert ours.plan.decision("expert_load").required
    assert not stock.plan.decision("expert_load").required
