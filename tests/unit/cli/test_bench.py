"""`bench`: what its options ask to be measured."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode, InputError
from moe_optimizer.inspection.kernel_speeds import measured_dir, write_tables
from moe_optimizer.launcher import launch
from moe_optimizer.measure.bench import run
from moe_optimizer.measure.bench import side as bench_side
from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.schedule import Turn
from moe_optimizer.measure.bench.side import STOCK, RunningSide
from moe_optimizer.measure.kernel_speeds import tables
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.quality import run as quality_run
from moe_optimizer.plan.decision import Status
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, SpeedQuestion, TokenSpeeds
from tests.builders.results import bench_result

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchRequest]:
    """What would be measured; nothing is."""
    requests: list[BenchRequest] = []

    def note(request: BenchRequest, **_: object) -> None:
        requests.append(request)
        raise InputError("noted")

    monkeypatch.setattr(run, "run_bench", note)
    monkeypatch.setattr(quality_run, "run_quality", note)
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


def test_a_switch_is_no_wish_for_the_profile_that_is_compared_with(asked: list[BenchRequest]) -> None:
    arguments = ["--enable-speculation", "--require", "expert_load", "--against", "balanced"]
    main(["bench", TINY_MOE, *arguments, "--calibrate", "0"])
    ours, other = asked[0].sides
    assert ("speculation" in ours.passes, "speculation" in other.passes) == (True, False)
    assert (ours.name, other.name) == ("balanced +speculation", "balanced")
    assert other.plan is not None
    assert not other.plan.decision("expert_load").required


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--repetitions", "2"], True), (["--repetitions", "3"], False), (["--repetitions", "2", "--against", ""], False)],
)
def test_two_rounds_are_said_to_show_no_difference_before_they_are_measured(
    arguments: list[str], said: bool, asked: list[BenchRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bench", TINY_MOE, *arguments, "--calibrate", "0"])
    assert asked
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: --repetitions 2")]
    assert len(warned) == said


def test_a_server_that_runs_already_is_sent_prompts_that_no_earlier_benchmark_sent(
    asked: list[BenchRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = "http://127.0.0.1:1"
    running = RunningSide(base_url=url, model="m", max_model_len=8192, ready_s=None, info=None)
    monkeypatch.setattr(bench_side, "ask", lambda _url: running)
    # Drawn, two sets of prompts are one in a million times the same.
    sets = itertools.count()
    monkeypatch.setattr("secrets.randbelow", lambda _most: next(sets))
    for folder in ("one", "other", "one"):
        run_dir = str(tmp_path / folder)
        main(["bench", TINY_MOE, "--plan", url, "--against", "", "--workload", "chat", "--run-dir", run_dir])
    first, second, resumed = (prompts_of(request) for request in asked)
    assert [len(each) for each in first] == [len(each) for each in second]
    assert not {chunk for each in first for chunk in each} & {chunk for each in second for chunk in each}
    assert resumed == first


def prompts_of(request: BenchRequest) -> list[tuple[int, ...]]:
    """What stands for the prompts of its first round."""
    turn = Turn(load=request.loads[0], repetition=0, side=0, counted=True)
    return [each.hash_ids for each in request.requests(turn)]


def fast_kernel(question: SpeedQuestion) -> KernelSpeeds:
    return KernelSpeeds(
        **{field.name: getattr(question, field.name) for field in dataclasses.fields(SpeedQuestion)},
        rows=tuple(TokenSpeeds(tokens=tokens, stock_us=9.0, ours_us={"fused_experts": 1.0}) for tokens in (1, 4096)),
        source="a stand-in",
    )


@pytest.mark.parametrize(("finished", "times"), [(True, 1), (False, 2)])
def test_both_sides_are_planned_by_the_same_measurements(
    finished: bool, times: int, asked: list[BenchRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A measurement that answers everything is not made again; what the last one found is in both plans."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[SpeedRequest] = []

    def measure(request: SpeedRequest, **_: object) -> None:
        measured.append(request)
        if finished or len(measured) == 2:
            write_tables(measured_dir() / "all.json", tuple(map(fast_kernel, request.questions)))

    monkeypatch.setattr(tables, "measure_speeds", measure)
    main(["bench", TINY_MOE, "--against", "balanced", "--port", "18123"])
    assert len(measured) == times
    ours, other = (side.plan for side in asked[0].sides)
    assert ours is not None
    assert other is not None
    assert ours.decision("flash_dmoe") == other.decision("flash_dmoe")
    assert ours.decision("flash_dmoe").status is Status.ON


def test_a_run_that_goes_on_measures_no_kernels_and_asks_what_the_stopped_one_asked(
    asked: list[BenchRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A measurement that its time ended goes on at the next start, and would change the plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[SpeedRequest] = []

    def measure(request: SpeedRequest, **_: object) -> None:
        measured.append(request)
        if len(measured) > 2:  # each side asked once, and was not answered
            write_tables(measured_dir() / "all.json", tuple(map(fast_kernel, request.questions)))

    monkeypatch.setattr(tables, "measure_speeds", measure)
    words = ["bench", TINY_MOE, "--against", "balanced", "--port", "18123", "--run-dir", str(tmp_path / "run")]
    main(words)
    assert len(measured) == 2
    asked[0].claim_folder()
    main([*words, "--resume"])
    asked[1].claim_folder()
    assert asked[1].sides == asked[0].sides
    assert len(measured) == 2


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


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The file of a plan that was made for a user's own arguments."""
    arguments = ["--batch-size", "6", "--profile", "conservative", "--json", "--", "--max-model-len", "300"]
    assert main(["plan", TINY_MOE, *arguments]) == ExitCode.OK
    file = tmp_path / "a.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("command", ["bench", "quality"])
@pytest.mark.parametrize("beside", ["--plan", "--against"])
@pytest.mark.parametrize("given", [["--", "--max-model-len", "200"], ["--batch-size", "2"], ["--dtype", "bfloat16"]])
def test_what_cannot_reach_the_plan_of_a_file_is_refused(
    command: str,
    beside: str,
    given: list[str],
    planned: str,
    asked: list[BenchRequest],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, TINY_MOE, beside, planned, "--calibrate", "0", *given]) == ExitCode.BAD_INPUT
    assert f"{planned} and {given[0]}: the plan is served as it is" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "quality"])
@pytest.mark.parametrize("given", [["--profile", "balanced"], ["--enable-fp8"], ["--require", "fp8"]])
def test_a_wish_beside_the_plan_of_a_file_is_refused(
    command: str, given: list[str], planned: str, asked: list[BenchRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, TINY_MOE, "--plan", planned, "--calibrate", "0", *given]) == ExitCode.BAD_INPUT
    assert given[0] in capsys.readouterr().err


@pytest.mark.parametrize("other", [STOCK, "balanced"])
def test_the_other_side_has_the_arguments_that_a_files_plan_was_made_with(
    other: str, asked: list[BenchRequest], planned: str
) -> None:
    main(["bench", TINY_MOE, "--plan", planned, "--against", other, "--workload", "small", "--calibrate", "0"])
    for side in asked[0].sides:
        assert side.plan is not None
        assert side.plan.serve_args.value("--max-model-len") == "300"
        assert side.plan.workload.batch_size == 6


def test_a_port_reaches_both_sides(asked: list[BenchRequest], planned: str) -> None:
    main(["bench", TINY_MOE, "--plan", planned, "--workload", "small", "--port", "8200"])
    assert [side.plan.serve_args.value("--port") for side in asked[0].sides if side.plan is not None] == [
        "8200",
        "8201",
    ]


@pytest.mark.parametrize("workload", ["burst", "trace.jsonl"])
def test_requests_per_client_are_refused_where_there_are_no_clients(
    workload: str, tmp_path: Path, asked: list[BenchRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    where = workload if workload == "burst" else str(tmp_path / workload)
    assert main(["bench", TINY_MOE, "--workload", where, "--requests-per-client", "2"]) == ExitCode.BAD_INPUT
    assert "--requests-per-client" in capsys.readouterr().err


@pytest.mark.parametrize(("workload", "is_said"), [("small", True), ("text", False)])
def test_it_says_where_its_requests_judge_no_draft(
    workload: str,
    is_said: bool,
    asked: list[BenchRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "run_bench", lambda *_, **__: bench_result())
    arguments = ["--workload", workload, "--enable-speculation", "--calibrate", "0"]
    assert main(["bench", TINY_MOE, *arguments]) == ExitCode.OK
    assert ("random tokens judge no draft" in capsys.readouterr().err) == is_said
