"""Starts Python programs that need vLLM as forks of one process that has imported it: 8 s of processor time less each.

A program is as if Python had been started for it: a child of this process, which leads a session of its own, with the
arguments, the folder, the streams and the environment that it was given (also in /proc/PID/environ, by which the
launcher finds what it must end), and the `sitecustomize` of its PYTHONPATH. What it lacks is its own import of vLLM.

A fork is safe where no other thread can hold a lock: the process that forks has one thread, which is asserted.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from moe_optimizer.child_process import python_command

_FORKS = Path(__file__).resolve().parent / "forked"
"""Programs whose PYTHONPATH has this folder are forked."""
_MODULES = ("moe_optimizer.supervised", "moe_optimizer.measure.bench.vllm_load")
"""What is forked: servers of the launcher, and the load generator."""
_IMPORTED = (
    "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3_moe", "vllm.benchmarks.serve",
)  # fmt: skip
ANEW = {"MOE_TEST_STARTS_PYTHON": "1"}
"""In the environment of a server that is not to be forked."""
_ROOM = "MOE_TEST_ROOM"
_ROOM_BYTES = 65_536
"""For the environment of a fork, which is written where the kernel keeps that of the process that forks."""
_START_S = 600.0
"""For the import on a busy machine."""
_HIGH = 200
"""The descriptors of a fork that are not its own lie above those that it may be given."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class ForkedProcess:
    """What the launcher uses of subprocess.Popen."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it; Popen says 0 then too
                pid, status = self.pid, 0
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


@contextlib.contextmanager
def forks_for_popen() -> Iterator[None]:
    """Have subprocess.Popen fork the programs of `_MODULES` while the block lasts; the first imports vLLM."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_START_S)
    environment = dict(os.environ)  # a test may change it, for its own server
    importer: list[subprocess.Popen[Any]] = []

    class Popen(subprocess.Popen[Any]):
        def __new__(cls, args: Any, **options: Any) -> Any:
            if not isinstance(args, list) or not _forked(args, options.get("env") or {}):
                return super().__new__(cls)
            if not importer:
                importer.append(_importer(theirs.fileno(), environment))
                theirs.close()  # so that its death is seen
            return ForkedProcess(_fork(ours, args, options), args)

    with ours, theirs, mock.patch.object(subprocess, "Popen", Popen):
        try:
            yield
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            for each in importer:
                each.wait(timeout=60)


def _forked(args: list[str], environment: Mapping[str, str]) -> bool:
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    program = args[: len(python_command()) + 1]
    return (
        program == python_command("-m")
        and args[len(program)] in _MODULES
        and not ANEW.keys() & environment.keys()
        and str(_FORKS) in folders
    )


def _importer(descriptor: int, environ: Mapping[str, str]) -> subprocess.Popen[Any]:
    """Start the process that imports vLLM. It ends when the other end of its socket is closed."""
    environment = {**environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", _ROOM: "x" * _ROOM_BYTES}
    environment["MOE_TEST_COMPILES"] = "1"  # a fork that does not compile says so for itself
    folders = (environment.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2]))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = python_command("-m", __name__, str(descriptor))
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(descriptor,), cwd="/")


def _fork(ours: socket.socket, args: list[str], options: Mapping[str, Any]) -> int:
    """Ask for a program; return the id of its process, a child of this one."""
    unknown = options.keys() - {"env", "stdin", "stdout", "stderr", "start_new_session", "pass_fds"}
    assert not unknown, unknown
    assert options.get("start_new_session"), "a program without a session of its own"
    assert options["stdin"] == subprocess.DEVNULL, "a program that reads"
    output = options["stdout"] if isinstance(options["stdout"], int) else options["stdout"].fileno()
    passed = [output, *options.get("pass_fds", ())]
    request = {
        "arguments": args[len(python_command("-m")) :], "environment": options["env"], "cwd": str(Path.cwd()),
        "places": [1, *options.get("pass_fds", ())], "parent": os.getpid(),
    }  # fmt: skip
    # Its own parent is gone as soon as it is there: then it is a child of the nearest process that takes such ones.
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        socket.send_fds(ours, [json.dumps(request).encode()], passed)
        answer = ours.recv(100)
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the process that has imported vLLM is gone; its reason is above"
    found = psutil.Process(int(answer))
    assert (found.ppid(), os.getsid(found.pid), found.cwd()) == (os.getpid(), found.pid, request["cwd"])
    assert found.environ() == options["env"], "what is looked for from outside"
    return found.pid


def main(descriptor: int) -> None:
    """Import, then fork until the other end of the socket is closed."""
    for name in _IMPORTED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith(("moe_optimizer.ops", "moe_optimizer.vllm_plugin"))]
    assert not ours, f"a program may replace {ours} before it imports them"
    # Otherwise every fork looks through, and thereby copies, what all of them share.
    gc.freeze()
    with socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)) as channel:
        os.close(descriptor)
        while True:
            request, received, _, _ = socket.recv_fds(channel, 1 << 20, 16)
            if not request:
                return
            threads = len(list(Path("/proc/self/task").iterdir()))
            assert threads == 1, f"{threads} threads, expected one: a fork of this process may hang"
            pid = os.fork()
            if pid == 0:
                if os.fork():
                    os._exit(0)
                _become(channel, received, **json.loads(request))
                return
            os.waitpid(pid, 0)
            for each in received:
                os.close(each)


def _become(
    channel: socket.socket,
    received: list[int],
    *,
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    places: list[int],
    parent: int,
) -> None:
    """Go on as `python -P -m ARGUMENTS`."""
    while os.getppid() != parent:
        time.sleep(0.001)
    os.setsid()
    os.chdir(cwd)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in received]
    for each in received:
        os.close(each)
    for descriptor, place in zip(high, places, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.dup2(1, 2)
    _take_environment(environment)
    channel.send(str(os.getpid()).encode())
    channel.close()
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _take_environment(environment: dict[str, str]) -> None:
    """Have Python, what it starts, and everybody who looks from outside see this environment."""
    before = sys.path[:]
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(block) < end - begin, f"{end - begin} bytes for an environment of {len(block)}"
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:0] = [folder for folder in folders if folder not in before]
    # Python reads one file of this name. That of tests/vllm/forked has been read, but sets variables too.
    runpy.run_path(str(next(path for folder in folders if (path := Path(folder) / "sitecustomize.py").is_file())))


if __name__ == "__main__":
    main(int(sys.argv[1]))
