"""Checks the machine for the doctor: interpreter, C library, processor, GPUs, compilers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_optimizer.cli.check import Check
from moe_optimizer.resources import SOURCES

if TYPE_CHECKING:
    from moe_optimizer.specs.hardware import HardwareSpec

_MIN_PYTHON = (3, 11)
_MIN_GLIBC = (2, 28)
"""vLLM's wheels are tagged manylinux_2_28 (CPU build) and newer."""
_MIN_CUDA = (12, 1)
"""What the driver has to support for the oldest torch for CUDA that the embedded engine takes."""
_COMPILERS = ("g++", "c++", "clang++")
"""In the order in which build.sh looks for one."""
_BUILD_TOOLS = ("cmake", "ninja", "nvcc")


def machine_checks(hardware: HardwareSpec) -> Iterator[Check]:
    """Yield the checks of what serving and building need from the machine."""
    yield _python()
    yield _glibc()
    yield _cpu(hardware)
    yield _cuda(hardware)
    yield from _gpus(hardware)
    yield from _compilers()


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info[:2] >= _MIN_PYTHON:
        return Check("python", "ok", f"{version} at {sys.executable}")
    return Check("python", "missing", f"got {version}, expected 3.11 or newer", "install Python 3.11 or newer")


def _glibc() -> Check:
    name, version = platform.libc_ver()
    wanted = ".".join(map(str, _MIN_GLIBC))
    if name != "glibc":
        return Check("glibc", "missing", f"got {name or 'another C library'}, expected glibc {wanted} or newer",
                     "use a distribution with glibc; vLLM has no wheels for others")  # fmt: skip
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_GLIBC:
        return Check("glibc", "missing", f"got {version}, expected {wanted} or newer", "use a newer distribution")
    return Check("glibc", "ok", version)


def _cpu(hardware: HardwareSpec) -> Check:
    cpu = hardware.cpu
    if cpu is None:
        return Check("cpu", "note", "could not be read")
    isa = " ".join(cpu.isa) or "no vector extension our kernels use"
    return Check("cpu", "ok", f"{cpu.cores} cores, {cpu.memory.value / 2**30:.1f} GiB, {isa}")


def _cuda(hardware: HardwareSpec) -> Check:
    if hardware.gpu is None:
        reason = "; ".join(hardware.warnings) or "no NVIDIA GPU found"
        return Check("cuda", "note", reason, "models are served on the CPU; for GPUs install the NVIDIA driver")
    version, driver = hardware.cuda_version or "unknown", hardware.driver_version or "unknown"
    if hardware.cuda_version and tuple(map(int, version.split(".")[:2])) < _MIN_CUDA:
        wanted = ".".join(map(str, _MIN_CUDA))
        detail = f"got {version} of driver {driver}, expected {wanted} or newer"
        return Check("cuda", "missing", detail, "install a newer NVIDIA driver")
    return Check("cuda", "ok", f"{version}, driver {driver}")


def _gpus(hardware: HardwareSpec) -> Iterator[Check]:
    """Yield one check for each GPU, with its free and total memory as the driver reports them."""
    if hardware.gpu is None:
        yield Check("gpu memory", "note", "no GPU")
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            detail = f"{name}, {int(memory.free) / 2**30:.1f} of {int(memory.total) / 2**30:.1f} GiB free"
            yield Check(f"gpu {index}", "ok", detail)
    except pynvml.NVMLError as error:
        yield Check("gpu memory", "note", f"the driver does not report it: {error}", "check that nvidia-smi works")


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that build.sh takes."""
    names = filter(None, (os.environ.get("CXX"), *_COMPILERS))
    return next((path for name in names if (path := shutil.which(name))), None)


def _compilers() -> Iterator[Check]:
    compiler = find_compiler()
    if compiler is None:
        yield Check("compiler", "note", f"none of {', '.join(_COMPILERS)} found",
                    "install a C++ compiler, for example: apt install g++")  # fmt: skip
    else:
        yield Check("compiler", "ok", f"{_version(compiler)} ({compiler})")
    # An installed package has its kernels compiled already.
    for name in _BUILD_TOOLS if SOURCES.is_dir() else ():
        path = shutil.which(name, path=_tool_path())
        if path is not None:
            yield Check(name, "ok", f"{_version(path)} ({path})")
        elif name == "nvcc":
            yield Check(name, "note", "not found: the CUDA kernels cannot be built here", "install the CUDA toolkit")
        else:
            yield Check(name, "note", "not found: kernels cannot be built", f"run: pip install {name}")


def _tool_path() -> str:
    """Return PATH, this interpreter's scripts (pip's cmake and ninja) and the usual folder of the CUDA toolkit."""
    scripts = os.path.dirname(sys.executable)  # noqa: PTH120 - a virtual environment's link must not be resolved
    return os.pathsep.join([os.environ.get("PATH", os.defpath), scripts, "/usr/local/cuda/bin"])


def _version(path: str) -> str:
    """Return the line of `--version` that says it: nvcc's has "release", others begin with it."""
    try:
        tried = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    lines = tried.stdout.splitlines() or ["version unknown"]
    return next((line for line in lines if "release" in line), lines[0]).strip()
