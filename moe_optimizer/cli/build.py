"""Runs `moe-optimizer build`: compiles the kernels and reports what is built."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.child_process import child_process, python_environment
from moe_optimizer.cli.command_signature import takes
from moe_optimizer.cli.messages import Output
from moe_optimizer.cli.options import BuildOptions
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import ExitCode, UnsupportedError

if TYPE_CHECKING:
    from moe_optimizer.specs.software import KernelInventory

_SCRIPT = Path(__file__).resolve().parents[2] / "build.sh"
_GRACE_S = 10.0


@takes(BuildOptions)
def command(options: BuildOptions) -> Output:
    """Compile the kernels and report what is built.

    Runs build.sh. The build's own output goes to stderr. Exit code 3 when nothing is built afterwards.
    """
    from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory

    if not options.check:
        run_build(_SCRIPT)
    inventory = read_kernel_inventory()
    code = ExitCode.OK if inventory.built else ExitCode.UNSUPPORTED
    return Output(result=inventory, render=render_inventory, code=code)


def render_inventory(inventory: KernelInventory) -> str:
    """Return what is built as lines of text."""
    if not inventory.built:
        return f"kernels  not built: {inventory.reason}"
    cpu = ", ".join(inventory.cpu_ops) or "none"
    if inventory.cuda_ops:
        cuda = f"{', '.join(inventory.cuda_ops)} for {' '.join(inventory.cuda_archs)}"
    else:
        cuda = f"none: {inventory.cuda_why_not}" if inventory.cuda_why_not else "none"
    return f"kernels  built from sources {inventory.source_hash[:12]}\ncpu      {cpu}\ncuda     {cuda}"


def run_build(script: Path) -> None:
    """Run build.sh with its output on stderr. No process of the build outlives this call.

    Raises:
        UnsupportedError: there are no sources here, or the build failed.
    """
    if not script.is_file():
        raise UnsupportedError(
            f"{script}: not found: an installed package has its kernels compiled already",
            hint="to compile them yourself, run this from a checkout",
        )
    sys.stderr.flush()
    # Ctrl-C ends the whole build, compilers included.
    command = ["bash", str(script)]
    with clean_termination(), child_process(command, grace_s=_GRACE_S, stdout=2, env=_build_environment()) as process:
        code = process.wait()
    if code != 0:
        raise UnsupportedError(f"build.sh: ended with exit code {code}", hint="see its last lines above")


def _build_environment() -> dict[str, str]:
    """Return the environment with this interpreter's folder first in PATH: pip installs cmake and ninja there."""
    folder = str(Path(sys.executable).parent)
    return python_environment() | {"PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}
