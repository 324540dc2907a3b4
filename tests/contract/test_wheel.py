"""A wheel is whole: what it installs plans and computes away from the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Without a build in the checkout the first test has the kernels compiled, which takes minutes on a busy machine: once
# for each change of csrc, because the objects are kept.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.thorough]


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # The CUDA part is left out to save a minute, and -O0 after the build's own -O3 to save two thirds of the rest:
    # optimised, and with its CUDA part, the extension stands in the checkout, whose objects are taken where they fit.
    objects = _built_objects(folder / "objects")
    compiled = (
        f"cp {objects}/<OBJECT> <OBJECT> 2>/dev/null || "
        "<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O0 -o <OBJECT> -c <SOURCE>"
    )
    build = folder / "build" if objects.exists() else ROOT / "build" / "wheel"
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--config-settings=cmake.define.MOEOPT_NVCC=",
        f"--config-settings=cmake.define.CMAKE_CXX_COMPILE_OBJECT={compiled}",
        f"--config-settings=build-dir={build}",
        "--wheel-dir", str(folder), str(ROOT),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    (wheel,) = folder.glob("moe_optimizer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _built_objects(copies: Path) -> Path:
    """Copy what build.sh compiled and a build without CUDA compiles alike; nothing where it would compile again."""
    built = ROOT / "build" / "kernels"
    ask = [sys.executable, "-m", "ninja", "-n", "-C", str(built), "_kernels"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=False)
    if asked.returncode == 0 and "no work to do" in asked.stdout:
        folder = built / "CMakeFiles" / "_kernels.dir"
        shutil.copytree(folder, copies / folder.relative_to(built), ignore=shutil.ignore_patterns("module.cpp.o"))
    return copies


def _run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: without it the checkout's editable install would be found before the wheel.
    packages = sysconfig.get_path("purelib")
    environment = {"PYTHONPATH": f"{site}:{packages}", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True,
        text=True,
        cwd=site,
        env=environment,
        timeout=300,
        check=False,
    )


def test_it_carries_every_profile_and_hardware_fact(unpacked_wheel: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}

    assert files(unpacked_wheel / "moe_optimizer" / "configs") == files(ROOT / "configs")


def test_it_plans_the_bundled_model(unpacked_wheel: Path) -> None:
    done = _run(unpacked_wheel, "-m", "moe_optimizer", "plan", "--model", str(ROOT / "examples" / "tiny-moe"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["profile_name"] == "balanced"


def test_its_kernels_load_from_it(unpacked_wheel: Path) -> None:
    code = "from moe_optimizer import ops; print(ops.__file__); print(ops.kernels_available())"
    done = _run(unpacked_wheel, "-c", code)
    assert done.returncode == 0, done.stderr
    where, available = done.stdout.splitlines()
    assert where.startswith(str(unpacked_wheel))
    assert available.startswith("(True"), available


def test_it_brings_the_plugin_entry_point(unpacked_wheel: Path) -> None:
    (entry_points,) = unpacked_wheel.glob("*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "[vllm.general_plugins]\nmoe_optimizer=moe_optimizer.autoload:register" in text.replace(" = ", "=")
