"""Which Pythons get a wheel, and which wheels are refused. The real build is in tests/contract/test_wheel.py."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_wheels.py"
NAME = "moe_optimizer-1-cp311-cp311-manylinux_2_28_x86_64.whl"
INFO = {"extension": "_kernels.so", "cuda_ops": ["fused_experts"], "cuda_archs": ["sm_90a"], "nvcc": "13.0"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("build_wheels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_wheels", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pythons(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which interpreters are looked for; pyenv's stub of 3.12 is in it, and 3.11."""
    for version, text in {"3.12": "echo 'pyenv: command not found'; exit 127", "3.11": "echo 3.11"}.items():
        path = tmp_path / "bin" / f"python{version}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(script, "VERSIONS", ("3.11", "3.12"))
    return tmp_path


def test_a_missing_python_is_said_and_the_others_are_built(
    script: ModuleType, pythons: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.choose_pythons([]) == {"3.11": pythons / "bin" / "python3.11"}
    assert "Python 3.12: not found" in capsys.readouterr().err


def test_a_python_behind_pyenvs_stub_is_found(script: ModuleType, pythons: Path) -> None:
    real = pythons / "pyenv" / "versions" / "3.12.1" / "bin" / "python"
    real.parent.mkdir(parents=True)
    real.write_text("#!/bin/sh\necho 3.12\n", encoding="utf-8")
    real.chmod(0o755)
    assert script.find_python("3.12") == real


@pytest.mark.parametrize("wanted", ["3.12", "3.9", "/nowhere/python3.12"])
def test_a_python_asked_for_must_be_there(script: ModuleType, pythons: Path, wanted: str) -> None:
    with pytest.raises(script.WheelError, match=f"Python {wanted}: "):
        script.choose_pythons(["3.11", wanted])


def test_an_interpreter_may_be_named_by_its_path(script: ModuleType, pythons: Path) -> None:
    path = str(pythons / "bin" / "python3.11")
    assert script.choose_pythons([path]) == {"3.11": Path(path)}


def test_nothing_is_built_without_nvcc(
    script: ModuleType, pythons: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "find_nvcc", lambda: None)
    assert script.main(["--pythons", "3.11"]) == 3
    assert "no nvcc found" in capsys.readouterr().err


def write_wheel(path: Path, info: Mapping[str, Any] = INFO, *more: str, content: bytes = b"") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("moe_optimizer/ops/build_info.json", json.dumps(info))
        archive.writestr("moe_optimizer/ops/_kernels.so", content)
        for name in more:
            archive.writestr(name, "")
    return path


def test_a_right_wheel_is_described(script: ModuleType, tmp_path: Path) -> None:
    wheel = script.inspect_wheel(write_wheel(tmp_path / NAME))
    assert (wheel.cuda_archs, wheel.cuda_version) == (("sm_90a",), "13.0")


def test_a_wheel_for_one_machine_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.WheelError, match="expected manylinux"):
        script.inspect_wheel(write_wheel(tmp_path / "moe_optimizer-1-cp311-cp311-linux_x86_64.whl"))


def test_a_large_wheel_is_refused(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MAX_BYTES", 5_000)
    with pytest.raises(script.WheelError, match="expected less than 5000"):
        script.inspect_wheel(write_wheel(tmp_path / NAME, content=b"x" * 6_000))


@pytest.mark.parametrize(
    "stray", ["moe_optimizer.libs/libcudart-1f.so.13", "moe_optimizer/ops/_kernels.cpython-312-x86_64-linux-gnu.so"]
)
def test_a_second_shared_library_in_a_wheel_is_refused(script: ModuleType, tmp_path: Path, stray: str) -> None:
    with pytest.raises(script.WheelError, match=r"expected only moe_optimizer/ops/_kernels\.so"):
        script.inspect_wheel(write_wheel(tmp_path / NAME, INFO, stray))


def test_a_wheel_without_cuda_kernels_is_refused(script: ModuleType, tmp_path: Path) -> None:
    info = INFO | {"cuda_ops": [], "cuda_why_not": "nvcc is 11.8"}
    with pytest.raises(script.WheelError, match=r"no CUDA.* 11\.8"):
        script.inspect_wheel(write_wheel(tmp_path / NAME, info))
