"""What a run holds on its machine - folder, disk, port - and that it ends with its launcher, however that ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moe_optimizer.errors import InputError, ServerFailedError
from moe_optimizer.launcher import launch, run_folder
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.run_folder import RunFolder
from tests.eventually import eventually
from tests.free_ports import free_port
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.unit.launcher.stand_in import FAKE, Fake


def test_a_full_disk_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    with pytest.raises(InputError, match=rf"run folder {tmp_path}/run:.* 3.* 64 "):
        RunFolder(tmp_path / "run").check()
    assert list(tmp_path.iterdir()) == []


ON_A_SMALL_DISK = """
import os, signal, sys, threading
from pathlib import Path
from moe_optimizer.launcher import deployment, evidence, launch
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.plan.plan import Plan
evidence.PROOF_WAIT_S = 1.0
deployment.check_plugin_visible = lambda plan: None
deployment.server_command = lambda plan, arguments: [sys.executable, *sys.argv[3:]]
disk = Path(sys.argv[2])
said = {"its disk is full": threading.Event(), "there is room on its disk again": threading.Event()}
def fill(info):
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(1 << 16)):
                pass
        except OSError as error:
            print(error.strerror, file=sys.stderr)
    said["its disk is full"].wait(60)
    print("answer:", ServerClient(info.base_url).complete("a", max_tokens=1, timeout_s=60), file=sys.stderr)
    (disk / "filler").unlink()
    said["there is room on its disk again"].wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
def tell(line):
    print(line, file=sys.stderr, flush=True)
    for sign, event in said.items():
        if sign in line:
            event.set()
try:
    launch.serve(
        Plan.load(Path(sys.argv[1])), run_dir=disk / "run", echo=tell,
        on_ready=lambda info: threading.Thread(target=fill, args=[info]).start(),
    )
except launch.StopRequestedError:
    pass
"""


def test_a_server_whose_disk_is_full_serves_on_and_says_what_is_lost(fake: Fake, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("may not mount a disk of its own here")
    port, disk, source = free_port(), tmp_path / "disk", tmp_path / "planned.json"
    source.write_text(fake(port=port).to_json())
    disk.mkdir()
    mounted = ["unshare", "-rm", "sh", "-ec", f'mount -t tmpfs -o size=70m none {disk}; exec "$@"', "sh"]
    arguments = [sys.executable, "-c", ON_A_SMALL_DISK, str(source), str(disk), *FAKE, str(port)]
    ended = subprocess.run([*mounted, *arguments], capture_output=True, text=True, timeout=300, check=False)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 0, ended.stderr
    full, answer, room = (
        next(number for number, line in enumerate(lines) if sign in line)
        for sign in ("its disk is full", "answer: hello", "there is room on its disk again")
    )
    assert lines[full].startswith(f"warning: run folder {disk}/run: ")
    assert full < answer < room
    assert len([line for line in lines if "disk is full" in line]) == 1
    assert lines[-1].endswith("exit code 0")


def test_a_taken_port_starts_nothing(fake: Fake, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)):
            serve(fake(port=port), run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# Until the first server listens, the kernel would let the second one have the port too.
def test_a_port_on_which_another_run_is_starting_is_refused(fake: Fake, tmp_path: Path) -> None:
    port = free_port()
    taken = f"{port} on 127.0.0.1: another moe-optimizer serve is starting"
    refused = []

    def start_another(line: str) -> None:
        if line.startswith("starting"):
            with pytest.raises(InputError, match=taken), launch.running(fake(port=port), run_dir=tmp_path / "second"):
                pass
            refused.append(line)

    with pytest.raises(ServerFailedError, match="not ready"):
        serve(fake("silent", port=port), run_dir=tmp_path / "first", ready_timeout_s=0.0, echo=start_another)
    assert refused
    assert not (tmp_path / "second").exists()


def test_a_run_folder_in_use_is_refused_and_its_run_goes_on(fake: Fake, tmp_path: Path) -> None:
    with launch.running(fake(), run_dir=tmp_path) as info:
        plan = (tmp_path / "plan.json").read_bytes()
        with pytest.raises(InputError, match=rf"run folder {tmp_path}:.* {os.getpid()}"):
            serve(fake(), run_dir=tmp_path)
        assert (tmp_path / "plan.json").read_bytes() == plan
        assert psutil.pid_exists(info.pid)
    with launch.running(fake(), run_dir=tmp_path):
        pass


def test_a_lock_that_another_launcher_has_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    flock = run_folder.fcntl.flock

    def removed_first(descriptor: int, operation: int) -> None:
        (tmp_path / run_folder.LOCK_FILE).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(run_folder.fcntl, "flock", removed_first)
    with pytest.raises(InputError, match="in use"), folder.locked():
        pass


def test_a_run_folder_that_cannot_be_written_is_an_input_error(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        with pytest.raises(InputError, match="run folder"):
            serve(fake(), run_dir=tmp_path / name)


def test_a_pipe_in_the_run_folder_does_not_block(fake: Fake, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "server.log")
    with launch.running(fake(), run_dir=tmp_path) as info:
        assert info.log_path.is_file()
    (tmp_path / "launcher.lock").unlink()
    os.mkfifo(tmp_path / "launcher.lock")
    with pytest.raises(InputError, match=r"run folder.*regular"):
        serve(fake(), run_dir=tmp_path)


def test_a_run_folder_that_cannot_be_made_leaves_no_parents_behind(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new/" + "x" * 300, "new/er/" + "x" * 300, "there/" + "x" * 300):
        with pytest.raises(InputError, match=r"run folder.*too long"):
            serve(fake(), run_dir=tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_stop_request_whose_message_cannot_be_written_still_stops_everything(fake: Fake, tmp_path: Path) -> None:
    def close(line: str) -> None:
        if line.startswith("stopping"):
            raise BrokenPipeError

    def stop(_: ServerInfo) -> None:
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(BrokenPipeError):
        serve(fake(), run_dir=tmp_path, echo=close, on_ready=stop)
    assert not processes_of(tmp_path)


def test_a_refused_environment_leaves_no_run_folder(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(InputError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        serve(fake(), run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


LAUNCHER = """
import sys
from pathlib import Path
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.launcher import deployment, launch
deployment.check_plugin_visible = lambda plan: None
deployment.server_command = lambda plan, arguments: [sys.executable, *sys.argv[3:]]
def tell(line):
    print(line, file=sys.stderr, flush=True)
try:
    launch.serve(Plan.load(Path(sys.argv[1])), run_dir=Path(sys.argv[2]), on_ready=lambda info: None, echo=tell)
except launch.StopRequestedError:
    pass
"""


@pytest.fixture
def launcher(fake: Fake, tmp_path: Path, heeded_signals: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the launcher in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*behaviour: str) -> subprocess.Popen[str]:
        port = free_port()
        plan = fake(port=port)
        source = tmp_path / "planned.json"
        source.write_text(plan.to_json())
        arguments = [str(source), str(tmp_path / "run"), *FAKE, str(port), *behaviour]
        started.append(
            subprocess.Popen([sys.executable, "-c", LAUNCHER, *arguments], stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for left in processes_of(tmp_path / "run"):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_starting_stops_everything(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = launcher("silent")
    eventually(lambda: len(processes_of(tmp_path / "run")) == 2, "the server did not start")
    process.send_signal(number)
    assert process.wait(timeout=60) == 0
    assert not processes_of(tmp_path / "run")


def test_a_signal_while_a_request_of_the_launchers_own_is_not_answered_stops_everything(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launcher("unproven", "mute")
    log = tmp_path / "run" / "server.log"
    eventually(lambda: log.is_file() and "asked\n" in log.read_text(), "the server was not asked for a token")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert not processes_of(tmp_path / "run")


def test_a_signal_while_serving_stops_everything(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launcher()
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("ready"):
            break
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not processes_of(tmp_path / "run")


def started(run_dir: Path) -> bool:
    return bool(processes_of(run_dir))


def has_a_child(run_dir: Path) -> bool:
    return len(processes_of(run_dir)) == 2


def answers(run_dir: Path) -> bool:
    log = run_dir / "server.log"
    return log.is_file() and "asked\n" in log.read_text()


# While the server imports, loads, ignores the signal, and answers. Its child ignores signals and knows no launcher.
@pytest.mark.parametrize(
    ("behaviour", "moment"),
    [
        (("silent",), started),
        (("silent", "escape"), has_a_child),
        (("silent", "stubborn"), has_a_child),
        (("unproven", "mute"), answers),
    ],
)
def test_nothing_outlives_a_launcher_that_is_killed(
    launcher: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    behaviour: tuple[str, ...],
    moment: Callable[[Path], bool],
) -> None:
    process, run_dir = launcher(*behaviour), tmp_path / "run"
    eventually(lambda: moment(run_dir), "the server did not get there")
    process.kill()
    process.wait(timeout=60)
    eventually(lambda: not processes_of(run_dir), "it outlived its launcher")
