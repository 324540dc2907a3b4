"""`tune` as a whole: real plans, search and files between servers that are a stand-in."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import INTERRUPTED, candidate_plans, tuning
from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode, ServerFailedError
from moe_optimizer.launcher import launch
from moe_optimizer.measure.bench import run
from moe_optimizer.measure.bench.result import MemoryUse
from moe_optimizer.measure.bench.side import RunningSide, Side, StartFacts
from moe_optimizer.measure.bench.trace import read_trace
from moe_optimizer.measure.bench.vllm_load import LoadRequest
from moe_optimizer.measure.quality.request import QualityRequest
from moe_optimizer.measure.quality.result import QualityResult
from moe_optimizer.measure.tune import served as tune_served
from moe_optimizer.measure.tune import server_pool
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.plan import Plan
from tests.builders.quality import failure, quality_result

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
DURATION_S = 2.0
PINNED = ("--max-num-seqs", "64", "--enable-chunked-prefill")
"""Settings that are not searched: what is left has five values."""
Slowness = Callable[[Plan], float]


def is_on(plan: Plan, name: str) -> bool:
    return plan.decision(name).status is Status.ON


class PaperSide(RunningSide):
    """A server that answers nobody."""

    def check_alive(self, name: str) -> None:
        pass

    def facts(self) -> StartFacts:
        return StartFacts(ready_s=1.0, memory=MemoryUse(gpu_bytes=None, process_bytes=None), compilations=None)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Slowness]:
    """How slow the stand-in is with a plan: the first entry; servers and load generator are replaced."""
    slowness: list[Slowness] = []
    up: dict[str, Plan] = {}

    @contextlib.contextmanager
    def starting(side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[Callable[[], RunningSide]]:
        assert side.plan is not None
        url = f"http://{run_dir}"
        up[url] = side.plan
        yield lambda: PaperSide(base_url=url, model="paper", max_model_len=8192, ready_s=1.0, info=None)

    def send(module: str, request: LoadRequest, *, on_step: Callable[[float, str], None], **_: Any) -> None:
        for number, each in enumerate(request.rounds):
            on_step(number / len(request.rounds), each.title)
            requests = read_trace(Path(each.trace))
            # Not by the folders: plans name them, and a plan names the checkout. Of equal sides one would win
            # now and then.
            noise = random.Random(Path(each.samples).name).lognormvariate(0, 0.001)
            seconds = DURATION_S * noise * slowness[0](up[each.base_url])
            count = len(requests)
            samples = {
                "duration_s": seconds, "ttft_s": [seconds / 10] * count, "e2e_s": [seconds] * count, "itl_s": [],
                "input_tokens": [one.input_length for one in requests],
                "output_tokens": [one.output_length for one in requests], "errors": [""] * count, "energy_j": None,
            }  # fmt: skip
            Path(each.samples).write_text(json.dumps(samples), encoding="utf-8")

    monkeypatch.setattr(launch, "check", lambda *_, **__: None)
    for place in (run, server_pool, tune_served):
        monkeypatch.setattr(place, "starting", starting)
    monkeypatch.setattr(run, "run_measurement", send)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return slowness


def tune(folder: Path, *arguments: str) -> tuple[int, Any]:
    common = ["--calibrate", "0", "--clients", "2", "--requests-per-client", "1", "--run-dir", str(folder)]
    code = main(["tune", TINY_MOE, *common, *arguments, "--", *PINNED])
    ledger = folder / "ledger.json"
    return code, json.loads(ledger.read_text(encoding="utf-8")) if ledger.exists() else None


def seconds_before(folder: Path) -> float:
    """Return how long everything before a search took, in all its runs."""
    return float((folder / "measured" / "before.seconds").read_text(encoding="utf-8"))


@pytest.mark.parametrize("named", [False, True])
def test_on_a_cpu_there_are_two_clients_for_each_core_or_those_of_the_batch_size(
    named: bool, served: list[Slowness], tmp_path: Path
) -> None:
    served.append(lambda _: 1.0)
    arguments = ("--calibrate", "0", "--requests-per-client", "1", "--run-dir", str(tmp_path / "run"))
    assert main(["tune", TINY_MOE, *arguments, "--", *PINNED[0 if named else 2 :]]) == ExitCode.OK
    cpu = Plan.load(tmp_path / "run" / "plan.json").hardware.cpu
    assert cpu is not None
    clients = 64 if named else 2 * cpu.cores
    samples = [each.name for each in (tmp_path / "run").rglob("side-*.json")]
    assert samples
    assert all(f"_{clients}-clients_" in name for name in samples), samples


def test_a_slow_pass_is_off_in_the_plan_that_is_written_and_serve_takes_it(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.append(
        lambda plan: (1.3 if is_on(plan, "expert_load") else 1.0) * (0.6 if is_on(plan, "scheduler") else 1.0)
    )
    code, ledger = tune(tmp_path / "run")
    assert code == ExitCode.OK
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 80
    verdicts = {each["what"]: each["verdict"] for each in ledger["entries"] if each["step"] == "ablation"}
    # The planner leaves the kernel off, since nothing has measured it.
    assert verdicts == {"expert_load": "slower", "scheduler": "faster", "flash_dmoe": "no difference shown"}
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert not is_on(plan, "expert_load")
    assert is_on(plan, "scheduler")
    assert plan.digest == ledger["plan_digest"]
    assert main(["serve", "--plan", str(tmp_path / "run" / "plan.json"), "--dry-run", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == json.loads(plan.to_json())


@pytest.mark.parametrize(("flags", "tried"), [((), True), (("--disable-flash-dmoe",), False)])
def test_a_pass_that_the_planner_left_off_is_tried_unless_somebody_switched_it_off(
    flags: tuple[str, ...], tried: bool, served: list[Slowness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "run_quality", lambda request, **_: quality_result())
    served.append(lambda plan: 0.5 if is_on(plan, "flash_dmoe") else 1.0)
    code, ledger = tune(tmp_path / "run", *flags)
    assert code == ExitCode.OK
    assert ("flash_dmoe" in ledger["passes"]) is tried
    assert is_on(Plan.load(tmp_path / "run" / "plan.json"), "flash_dmoe") is tried


def test_a_setting_that_wins_is_in_the_plan(served: list[Slowness], tmp_path: Path) -> None:
    served.append(lambda plan: 0.5 if plan.serve_args.value("--max-num-batched-tokens") == "4096" else 1.0)
    code, ledger = tune(tmp_path / "run")
    assert code == ExitCode.OK
    assert ledger["arguments"]["--max-num-batched-tokens"] == "4096"
    assert Plan.load(tmp_path / "run" / "plan.json").serve_args.value("--max-num-batched-tokens") == "4096"


def test_a_plan_that_is_stock_vllm_says_that_the_tuning_has_switched_passes_off(
    served: list[Slowness], tmp_path: Path
) -> None:
    served.append(lambda plan: 1.0 if plan.serve_args == plan.plain_args else 1.3)
    tune(tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.decision("expert_load").reason == "switched off by tune"
    assert plan.serve_args == plan.plain_args


def test_a_pipe_is_told_what_is_started_before_it_is_measured(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def listen(plan: Plan) -> float:
        heard.append(capsys.readouterr().err)
        return 1.0

    served.append(listen)
    tune(tmp_path / "run")
    assert "the plan against stock vLLM" in heard[0]


def test_a_second_run_in_the_folder_measures_nothing_again(served: list[Slowness], tmp_path: Path) -> None:
    served.append(lambda plan: 0.8 if is_on(plan, "scheduler") else 1.0)
    _, first = tune(tmp_path / "run")
    before_s = seconds_before(tmp_path / "run")

    def nobody(plan: Plan) -> float:
        raise AssertionError("measured again")

    served[0] = nobody
    second = tune(tmp_path / "run")[1]
    # What came before its search was spent too.
    assert seconds_before(tmp_path / "run") > before_s
    del first["spent_s"], second["spent_s"]
    assert second | {"date": first["date"]} == first


def test_a_budget_in_which_nothing_was_compared_ends_with_4_and_no_plan_and_a_larger_one_goes_on(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.append(lambda plan: 1.0)
    code, ledger = tune(tmp_path / "run", "--budget", "0.01s")
    shown, said = capsys.readouterr()
    assert (code, ledger["met"], ledger["plan_file"]) == (ExitCode.GOAL_MISSED, False, None)
    assert "run_optimizer" not in shown
    assert {"--resume", "--budget", str(tmp_path / "run")} <= set(said.splitlines()[-1].split())
    assert not (tmp_path / "run" / "plan.json").exists()
    assert tune(tmp_path / "run", "--resume")[0] == ExitCode.OK
    assert Plan.load(tmp_path / "run" / "plan.json")


def test_an_interrupted_search_says_how_it_goes_on(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(plan: Plan) -> float:
        raise KeyboardInterrupt

    served.append(stop)
    code, ledger = tune(tmp_path / "run")
    assert (code, ledger["ended"], ledger["plan_file"]) == (INTERRUPTED, "interrupted", None)
    said = set(capsys.readouterr().err.splitlines()[-1].split())
    assert {"--resume", str(tmp_path / "run")} <= said
    assert "--budget" not in said


def test_an_interrupted_search_that_has_a_plan_names_its_file(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(plan: Plan) -> float:
        if not is_on(plan, "expert_load") and is_on(plan, "scheduler"):
            raise KeyboardInterrupt
        return 1.0

    served.append(stop)
    code, ledger = tune(tmp_path / "run")
    assert (code, ledger["ended"]) == (INTERRUPTED, "interrupted")
    assert ledger["plan_file"] in capsys.readouterr().err.splitlines()[-1]


def test_the_time_before_the_search_is_of_the_budget(served: list[Slowness], tmp_path: Path) -> None:
    served.append(lambda plan: 1.0)
    begin = time.monotonic()
    ledger = tune(tmp_path / "run")[1]
    outside_s = time.monotonic() - begin - ledger["spent_s"]
    before_s = seconds_before(tmp_path / "run")
    assert before_s > 0
    assert ledger["spent_s"] > before_s + sum(each["seconds"] for each in ledger["entries"])
    assert outside_s > 0


def test_measurements_for_another_goal_are_not_taken(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.append(lambda plan: 1.0)
    tune(tmp_path / "run")
    assert tune(tmp_path / "run", "--goal", "latency")[0] == ExitCode.BAD_INPUT
    assert "--run-dir" in capsys.readouterr().err


def test_limits_that_no_plan_keeps_end_with_the_nearest_miss(served: list[Slowness], tmp_path: Path) -> None:
    served.append(lambda plan: 0.8 if is_on(plan, "scheduler") else 1.0)
    code, ledger = tune(tmp_path / "run", "--goal", "ttft<100ms")
    assert code == ExitCode.GOAL_MISSED
    assert 1.5 < ledger["nearest_miss"]["score"] < 1.7


def test_a_limit_of_times_per_token_needs_completions_of_two_tokens(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.append(lambda plan: 1.0)
    file = tmp_path / "one.yaml"
    kind = "{prompt: {least: 4, most: 8}, output: {least: 1, most: 1}}"
    file.write_text(f"description: d\nrequests: [{kind}]\nclients: [1]\n", encoding="utf-8")
    arguments = ("--workload", str(file), "--goal", "ttft<900ms,tpot<30ms")
    assert tune(tmp_path / "run", *arguments)[0] == ExitCode.BAD_INPUT
    assert "two tokens" in capsys.readouterr().err


def test_a_server_that_dies_is_a_line_of_the_ledger(served: list[Slowness], tmp_path: Path) -> None:
    def dies(plan: Plan) -> float:
        if is_on(plan, "scheduler"):
            raise ServerFailedError("the server has ended")
        return 1.0

    served.append(dies)
    code, ledger = tune(tmp_path / "run")
    assert code == ExitCode.OK
    assert ledger["passes"] == []
    assert ledger["entries"][0]["reason"] == "the server has ended"


def test_servers_that_never_start_end_with_7_and_a_ledger(served: list[Slowness], tmp_path: Path) -> None:
    def dies(plan: Plan) -> float:
        raise ServerFailedError("the server has ended")

    served.append(dies)
    code, ledger = tune(tmp_path / "run")
    assert code == ExitCode.SERVER_FAILED
    assert not any(each["kept"] for each in ledger["entries"])


def test_a_winner_whose_answers_changed_is_judged_and_the_pass_at_fault_is_off(
    served: list[Slowness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[QualityRequest] = []

    def judge(request: QualityRequest, **_: object) -> QualityResult:
        judged.append(request)
        return quality_result(failed=(failure(pass_name="flash_dmoe"),))

    monkeypatch.setattr(tuning, "run_quality", judge)
    served.append(lambda plan: 0.5 if is_on(plan, "flash_dmoe") else 1.0)
    code, ledger = tune(tmp_path / "run", "--enable-flash-dmoe")
    assert code == ExitCode.OK
    assert [is_on(each.judged_plan, "flash_dmoe") for each in judged] == [True] * len(judged)
    assert judged
    assert "flash_dmoe" not in ledger["passes"]
    assert "at fault: flash_dmoe" in next(each["reason"] for each in ledger["entries"] if each["step"] == "quality")


def test_a_run_whose_plan_was_judged_meanwhile_goes_on_and_measures_no_kernels_again(
    served: list[Slowness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(tuning, "run_quality", lambda request, **_: quality_result())
    monkeypatch.setattr(candidate_plans, "measure_if_needed", lambda plan, *_: measured.append(plan.model.name))
    served.append(lambda plan: 0.5 if is_on(plan, "flash_dmoe") else 1.0)
    code, first = tune(tmp_path / "run", "--enable-flash-dmoe")
    # Of passes that change nothing here one in twenty wins by chance.
    assert "flash_dmoe" in first["passes"]
    assert (code, len(measured)) == (ExitCode.OK, 1)
    code, second = tune(tmp_path / "run", "--enable-flash-dmoe", "--resume")
    assert (code, second["entries"], len(measured)) == (ExitCode.OK, first["entries"], 1)


def test_a_judgement_of_random_weights_says_in_the_ledger_that_it_says_little(
    served: list[Slowness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "run_quality", lambda request, **_: quality_result(flat=True))
    served.append(lambda plan: 0.5 if is_on(plan, "flash_dmoe") else 1.0)
    _, ledger = tune(tmp_path / "run", "--enable-flash-dmoe")
    reason = next(each["reason"] for each in ledger["entries"] if each["step"] == "quality")
    assert "random weights" in reason


@pytest.mark.parametrize("workload", ["chat", "text"])
def test_drafts_are_judged_with_text_alone(workload: str, served: list[Slowness], tmp_path: Path) -> None:
    served.append(
        lambda plan: (1.2 if is_on(plan, "speculation") else 1.0) * (0.5 if is_on(plan, "scheduler") else 1.0)
    )
    tune(tmp_path / "run", "--workload", workload, "--enable-speculation")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))
    line = next(each for each in ledger["entries"] if each["what"] == "speculation")
    if workload == "text":
        assert (line["verdict"], line["kept"]) == ("slower", False)
        assert "speculation" not in ledger["passes"]
    else:
        assert (line["verdict"], line["kept"]) == (None, True)
        assert "random tokens judge no draft" in line["reason"]


def test_stock_vllm_beside_a_tuned_plan_has_the_users_arguments_and_not_the_tuned_ones(
    served: list[Slowness], tmp_path: Path
) -> None:
    served.append(lambda plan: 0.5 if plan.serve_args.value("--max-num-batched-tokens") == "512" else 1.0)
    assert tune(tmp_path / "run")[0] == ExitCode.OK
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.serve_args.value("--max-num-batched-tokens") == "512"
    assert plan.plain_args.value("--max-num-batched-tokens") is None
    assert plan.plain_args.value("--max-num-seqs") == "64"


@pytest.mark.parametrize(
    "given", [["--goal", "latency"], ["--clients", "3"], ["--workload", "decode"], ["--seed", "1"]]
)
def test_what_the_tuning_of_the_triton_kernel_alone_has_no_use_for_is_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", TINY_MOE, "--only", "triton", *given]) == ExitCode.BAD_INPUT
    assert given[0] in capsys.readouterr().err


def test_options_of_the_triton_kernel_are_refused_where_it_does_not_run(
    served: list[Slowness], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert tune(tmp_path / "run", "--tokens", "1,2")[0] == ExitCode.BAD_INPUT
    assert "--tokens" in capsys.readouterr().err


def test_without_optuna_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert tune(tmp_path / "run")[0] == ExitCode.UNSUPPORTED
    assert "moe-optimizer[tune]" in capsys.readouterr().err


def test_a_plan_is_served_as_it_is_or_not_at_all(
    served: list[Slowness], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.append(lambda plan: 1.0)
    tune(tmp_path / "run")
    file = str(tmp_path / "run" / "plan.json")
    for wish in (["--enable-fp8"], ["--profile", "balanced"], ["--", "--seed", "1"], ["--require", "fp8"]):
        assert main(["serve", "--plan", file, *wish]) == ExitCode.BAD_INPUT
        assert "--plan" in capsys.readouterr().err
