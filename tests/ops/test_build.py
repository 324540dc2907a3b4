"""What build.sh says, and what the built module is like inside a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.compiled_kernels import needs_kernels

ROOT = Path(__file__).resolve().parents[2]


def build(*arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "build.sh"), *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "unknown argument '--fast'"),
        (["--arch"], "--arch: got no"),
        (["--arch", ""], "--arch: got no"),
        (["--arch="], "--arch: got no"),
        (["--arch", "hopper"], "--arch: got 'hopper'"),
    ],
)
def test_wrong_arguments_end_with_a_sentence_a_hint_and_code_2(arguments: list[str], message: str) -> None:
    result = build(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "\nhint: " in result.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CXX": "no-such-compiler"}, "(no-such-compiler)"),
        ({"CXX": "false"}, "false: does not"),
        # Prints a version and fails all the same.
        ({"CXX": "/bin/false"}, "/bin/false: does not"),
        ({"PYTHON": "no-such-python"}, "no-such-python: expected Python"),
    ],
)
def test_a_missing_tool_ends_with_a_sentence_a_hint_and_code_3(environment, message) -> None:
    result = build(**environment)
    assert result.returncode == 3
    assert message in result.stderr
    assert "\nhint: " in result.stderr


SMALL_PROJECT = r"""
cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
add_library(small OBJECT EXCLUDE_FROM_ALL small.cpp)
target_compile_features(small PRIVATE cxx_std_17)
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
set(extension "_kernels.${Python_SOABI}.so")
file(WRITE "${CMAKE_BINARY_DIR}/${extension}" "")
file(WRITE "${CMAKE_BINARY_DIR}/build_info.json" "{
  \"extension\": \"${extension}\", \"python\": \"${Python_EXECUTABLE}\",
  \"cpu_ops\": [], \"isa_paths\": [], \"compiler\": \"\", \"cuda_ops\": [], \"cuda_why_not\": \"small\"
}")
"""


def small_project(folder: Path) -> Path:
    """Return a checkout whose kernels are one empty file."""
    (folder / "csrc").mkdir()
    (folder / "moe_optimizer" / "ops").mkdir(parents=True)
    for name in ("build.sh", "csrc/build_info.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "csrc" / "CMakeLists.txt").write_text(SMALL_PROJECT, encoding="ascii")
    (folder / "csrc" / "small.cpp").touch()
    return folder


@pytest.mark.thorough
def test_a_compiler_that_works_builds_after_one_that_did_not(tmp_path: Path) -> None:
    small_project(tmp_path)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho broken 1.0\n", encoding="ascii")
    broken.chmod(0o755)

    failed = build(root=tmp_path, CXX=str(broken))
    assert failed.returncode == 3
    assert "cmake could not" in failed.stderr
    worked = build(root=tmp_path)
    assert worked.returncode == 0, worked.stderr
    assert f"kernels built: moe_optimizer/ops/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}" in worked.stdout


# CMake would take another Python, and a module for it, without a word.
@pytest.mark.thorough
def test_a_relative_path_names_the_python_that_is_built_for(tmp_path: Path) -> None:
    small_project(tmp_path)
    relative = os.path.relpath(sys.executable)
    result = build(root=tmp_path, PYTHON=relative)
    assert result.returncode == 0, result.stderr
    info = json.loads((tmp_path / "moe_optimizer" / "ops" / "build_info.json").read_text(encoding="utf-8"))
    assert info["python"] == sys.executable


@pytest.mark.thorough
def test_a_module_of_another_python_is_not_up_to_date(tmp_path: Path) -> None:
    ops = small_project(tmp_path) / "moe_optimizer" / "ops"
    assert build(root=tmp_path).returncode == 0
    info = json.loads((ops / "build_info.json").read_text(encoding="utf-8"))
    other = "_kernels.cpython-310-x86_64-linux-gnu.so"
    (ops / info["extension"]).rename(ops / other)
    (ops / "build_info.json").write_text(json.dumps(info | {"extension": other, **_hash(tmp_path)}), encoding="utf-8")
    result = build(root=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "kernels built" in result.stdout


def _hash(root: Path) -> dict[str, str]:
    """Return the hash of a checkout's sources, as a build keeps it."""
    compiler = shutil.which("g++") or shutil.which("c++") or "c++"
    command = [sys.executable, str(root / "csrc" / "build_info.py"), "hash", "--compiler", compiler]
    command += ["--cuda-archs", "sm_90a"]
    return {"source_hash": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}


# The compiler would refuse the kernels too, after a minute and with a page of instructions it does not know.
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_90a,sm_100a"])
def test_an_architecture_without_kernels_is_unsupported(arch: str) -> None:
    result = build("--arch", arch)
    assert result.returncode == 3
    assert f"--arch: got {arch}," in result.stderr
    assert "sm_90a" in result.stderr
    assert "\nhint: " in result.stderr


# CMake finds it there first; a hash that only knew PATH would call a module up to date that another nvcc built.
def test_another_nvcc_in_cuda_home_is_another_build(tmp_path: Path) -> None:
    hashes = set()
    for release in ("12.4", "13.0"):
        nvcc = tmp_path / release / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n", encoding="ascii"
        )
        nvcc.chmod(0o755)
        result = subprocess.run(
            [sys.executable, str(ROOT / "csrc" / "build_info.py"), "hash", "--compiler", "c++"],
            env=os.environ | {"CUDA_HOME": str(tmp_path / release)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        hashes.add(result.stdout)
    assert len(hashes) == 2


@needs_kernels
def test_build_info_names_the_module_and_its_paths() -> None:
    folder = ROOT / "moe_optimizer" / "ops"
    info = json.loads((folder / "build_info.json").read_text(encoding="utf-8"))
    assert (folder / info["extension"]).is_file()
    assert {"fused_experts", "flash_dmoe"} <= set(info["cpu_ops"])
    assert info["isa_paths"][0] == "generic"
    assert bool(info["cuda_ops"]) == (info["cuda_why_not"] == "")
    assert len(info["source_hash"]) == 64


# Two runtimes would each start a full set of threads and wait for each other's processors.
@pytest.mark.thorough
@needs_kernels
def test_the_process_has_one_openmp_runtime() -> None:
    code = """
from moe_optimizer.ops import kernels_available
import re
assert kernels_available()[0]
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"/\\S*lib(?:gomp|omp|iomp5)[^/\\s]*[.]so\\S*", maps))))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip() == "1"


# A function that two objects define is linked once: in its AVX-512 version it would crash an older machine.
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_instruction_set_objects_share_no_functions() -> None:
    objects = sorted((ROOT / "build" / "kernels").glob("**/expert_kernels_avx*.o"))
    if not objects:
        pytest.skip("no objects of a build here")
    for path in objects:
        symbols = subprocess.run(["nm", str(path)], capture_output=True, text=True, timeout=300, check=True).stdout
        shared = [line for line in symbols.splitlines() if line.split()[-2] in "WVu"]
        assert not shared, f"{path.name}: {shared}"
