"""Runs command lines in forks of one process that has imported the command: each is a process of its own, with limits,
streams, an exit code and an environment of its own, and saves the start of Python and of the package.

`python -m tests.contract.command_forks ANSWERS` reads requests from stdin, one JSON object a line, and writes to the
descriptor ANSWERS a line with the exit code of each. A fork is safe where no other thread can hold a lock: it has none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path

TINY_MOE = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
# Prints the modules that a plan needs. Only imported here: what a command computes and keeps stays in its own process.
NEEDED = f"""
import sys
from moe_optimizer.cli.main import main
main(["serve", {str(TINY_MOE)!r}, "--dry-run"])
print(*sys.modules, file=sys.stderr)
"""


def import_needed() -> None:
    done = subprocess.run([sys.executable, "-c", NEEDED], capture_output=True, text=True, timeout=300, check=True)
    for name in done.stderr.splitlines()[-1].split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main(answers: int) -> None:
    """Answer until stdin ends."""
    import_needed()
    # Otherwise every fork looks through, and thereby copies, what all of them share.
    gc.freeze()
    for line in os.fdopen(os.dup(0), encoding="utf-8"):
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork beside other threads may hang"
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _become(**json.loads(line))
            return
        os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


def _become(
    program: list[str], arguments: list[str], cwd: str, env: dict[str, str], streams: list[str], limits: dict[str, int]
) -> None:
    """Go on as `python PROGRAM ARGUMENTS`, whose stdout and stderr are files."""
    os.setsid()
    for descriptor, path in enumerate([os.devnull, *streams]):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.alarm(limits["seconds"])
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"]))
    sys.argv = [program[-1], *arguments]
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
