"""Tuning of the Triton kernel alone: what it refuses, what it asks of the tuning process, what it shows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import tune_triton
from moe_optimizer.cli.main import main
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.cli.tune_triton import run_tuning
from moe_optimizer.errors import ExitCode, InputError, MoeOptimizerError, UnsupportedError
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.inspection.tuned_configs import SHIPPED
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.specs.software import VllmInstallation
from tests.builders import gpus, made_plan, tiny_moe
from tests.eventually import eventually, is_running

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
VERDICT = {
    "tokens": 8, "stock": {}, "row": {}, "stock_us": 30.0, "row_us": 25.0, "ratio": 1.2, "low": 1, "high": 11,
}  # fmt: skip


FAKE = "tests.unit.cli.fake_tuning"


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here = load_hardware("cpu")
    monkeypatch.setattr("moe_optimizer.inspection.hardware_probe.probe_hardware", lambda: here)
    for arguments in ([], ["--hardware", "h200"]):
        assert main(["tune", TINY_MOE, "--only", "triton", *arguments]) == ExitCode.UNSUPPORTED
        assert capsys.readouterr().err.startswith("error: tune: needs ")


def test_that_there_is_no_gpu_comes_before_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = load_hardware("cpu")
    monkeypatch.setattr("moe_optimizer.inspection.hardware_probe.probe_hardware", lambda: here)
    config = json.loads((Path(TINY_MOE) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 900, "num_experts": 900}))
    assert main(["tune", str(tmp_path), "--only", "triton"]) == ExitCode.UNSUPPORTED
    assert capsys.readouterr().err.startswith("error: tune: needs ")


def on_an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This machine as one with an H200 and a vLLM for it; return the folder of vLLM's configurations."""
    shipped = tmp_path / "vllm" / SHIPPED
    shipped.mkdir(parents=True)
    vllm = VllmInstallation(distribution="vllm", version="0.26.0", device="cuda", location=str(tmp_path / "vllm"))
    here = dataclasses.replace(load_hardware("h200", 1), origin="probed", cpu=load_hardware("cpu").cpu)
    monkeypatch.setattr("moe_optimizer.inspection.vllm_installation.find_vllm", lambda: vllm)
    monkeypatch.setattr("moe_optimizer.inspection.hardware_probe.probe_hardware", lambda: here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shipped


def test_it_asks_for_the_shape_that_is_planned_and_shows_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = on_an_h200(monkeypatch, tmp_path)
    asked: dict[str, Any] = {}

    def fake(request: dict[str, Any], _: ProgressLines, *, log: Path) -> list[dict[str, Any]]:
        asked.update(request, log=log)
        folder = Path(request["folder"])
        folder.mkdir(parents=True)
        (folder / "E=16,N=128,device_name=NVIDIA_H200.json").write_text("{}", encoding="utf-8")
        return [VERDICT]

    monkeypatch.setattr(tune_triton, "run_tuning", fake)
    assert (
        main(["tune", TINY_MOE, "--only", "triton", "--disable-fp8", "--tokens", "8,1,8", "--budget", "90"])
        == ExitCode.OK
    )
    assert asked["tokens"] == [1, 8]
    assert asked["budget_s"] == 90
    assert asked["shipped_folder"] == str(shipped)
    assert asked["folder"] == str(tmp_path / "cache" / "moe-optimizer" / "tuned_configs" / "vllm-0.26.0")
    shown = capsys.readouterr().out
    assert "1.20x  1 to 11" in shown
    assert f"VLLM_TUNED_CONFIG_FOLDER={asked['folder']}" in shown
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 80


@pytest.mark.parametrize("text", ["", "0", "eight", "1,,8", "-1", "99999999"])
def test_impossible_sizes_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_an_h200(monkeypatch, tmp_path)
    assert main(["tune", TINY_MOE, "--only", "triton", "--disable-fp8", f"--tokens={text}"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("error: --tokens: got ")


def test_experts_that_triton_does_not_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_an_h200(monkeypatch, tmp_path)
    arguments = ["tune", TINY_MOE, "--only", "triton", "--disable-fp8", "--", "--quantization", "int8"]
    assert main(arguments) == ExitCode.UNSUPPORTED
    assert "found --quantization int8" in capsys.readouterr().err


def test_nothing_that_won_is_said() -> None:
    assert "no file" in tune_triton.render("E=1.json", None, [{**VERDICT, "low": 8, "high": 7}])


def test_the_process_reports_progress_and_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "new" / "tuning.log"
    assert run_tuning({"verdicts": [VERDICT]}, ProgressLines(verbose=False), log=log, module=FAKE) == [VERDICT]
    assert "50%  8 tokens: 12 rows tried" in capsys.readouterr().err
    assert log.read_text(encoding="utf-8") == "vLLM said something\n"


def test_a_refusal_comes_before_the_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = {"refused": "too little memory", "exit_code": 3, "progress": 0.0}
    with pytest.raises(UnsupportedError):
        run_tuning(request, ProgressLines(verbose=False), log=tmp_path / "log", module=FAKE)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (3, UnsupportedError)])
def test_a_refusal_of_the_process_is_the_commands(code: int, kind: type[MoeOptimizerError], tmp_path: Path) -> None:
    with pytest.raises(kind, match="too little memory"):
        run_tuning(
            {"refused": "too little memory", "exit_code": code},
            ProgressLines(verbose=False),
            log=tmp_path / "log",
            module=FAKE,
        )


def test_a_process_that_dies_in_the_middle_of_a_word_leaves_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(MoeOptimizerError, match="illegal memory access") as error:
        run_tuning({"dies": True}, ProgressLines(verbose=False), log=tmp_path / "log", module=FAKE)
    assert str(tmp_path / "log") in str(error.value.hint)


@pytest.mark.usefixtures("heeded_signals")
@pytest.mark.parametrize(
    ("number", "raised"), [(2, KeyboardInterrupt), (15, SystemExit), (1, SystemExit)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_leaves_no_process(number: int, raised: type[BaseException], tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def interrupt() -> None:
        eventually(pid_file.is_file)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(raised):
        run_tuning({"pid_file": str(pid_file)}, ProgressLines(verbose=False), log=tmp_path / "log", module=FAKE)
    thread.join()
    assert not is_running(int(pid_file.read_text()))


@pytest.mark.parametrize(("up_to", "left"), [(1 << 30, False), (4096, True)])
def test_beside_our_kernels_there_is_nothing_to_tune_where_they_compute_everything(up_to: int, left: bool) -> None:
    ours = FlashDmoeParams(kernel="cuda", dispatch={"bf16": (TokenRange(up_to=up_to, use="direct"),)})
    plan = made_plan(tiny_moe(), gpus("h200"))
    decisions = [
        dataclasses.replace(each, params=ours) if each.pass_name == "flash_dmoe" else each for each in plan.decisions
    ]
    with contextlib.nullcontext() if left else pytest.raises(UnsupportedError):
        tune_triton.check_left_to_triton(plan.replace(decisions=tuple(decisions)))
