"""Every process of a server ends with its launcher, also without the one that was started first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moe_optimizer import env, lifeline
from tests.eventually import eventually, is_running

# A server with a forked worker; both only watch. One of them says the worker's pid, in one write: two that print mix.
SERVER = """
import os, time
from moe_optimizer.autoload import register
register()
worker = os.fork()
if worker:
    os.write(1, b"%d\\n" % worker)
time.sleep(600)
"""
# One that has no free file descriptor for three seconds.
FULL = """
import os, resource, time
from moe_optimizer.autoload import register
register()
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
files = []
try:
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    time.sleep(3)
for file in files:
    os.close(file)
os.write(1, b"free\\n")
time.sleep(600)
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """Stands in for the launcher: it does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def environment(launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a server of that launcher. Without a plan the plugin does nothing but watch."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: launcher.pid)
        watched = lifeline.this_process()
    return {**os.environ, env.LAUNCHER: watched}


def start(environment: dict[str, str], program: str = SERVER) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("first_dies_too", [False, True])
def test_a_forked_process_ends_with_the_launcher(
    launcher: subprocess.Popen[bytes], environment: dict[str, str], first_dies_too: bool
) -> None:
    server = start(environment)
    assert server.stdout is not None
    worker = int(server.stdout.readline())
    try:
        assert is_running(worker)
        if first_dies_too:
            server.kill()
        launcher.kill()
        launcher.wait()
        server.wait(timeout=60)
        eventually(lambda: not is_running(worker), "it outlived its launcher")
    finally:
        for pid in (server.pid, worker):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_starts_after_the_launcher_is_gone_ends_at_once(
    launcher: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    launcher.kill()
    launcher.wait()
    assert start(environment).wait(timeout=60) == -signal.SIGKILL


def test_a_process_of_another_machine_is_left_alone(environment: dict[str, str]) -> None:
    pid, started_at, _ = environment[env.LAUNCHER].split(" ", 2)
    server = start({**environment, env.LAUNCHER: f"{pid} {int(started_at) + 1} elsewhere"})
    assert server.stdout is not None
    server.stdout.readline()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(timeout=2)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_server_without_a_free_file_descriptor_runs_on_and_ends_with_its_launcher(
    launcher: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    server = start(environment, FULL)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "free\n"
        assert is_running(server.pid)
        launcher.kill()
        launcher.wait()
        server.wait(timeout=60)
    finally:
        server.kill()
        server.wait()
