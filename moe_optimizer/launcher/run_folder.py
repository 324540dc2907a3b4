"""Prepares the folder of one run for its plan, logs and proofs, and locks it against a second run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.files import make_private_folder, write_atomically
from moe_optimizer.plan.plan import PLAN_FILE, Plan
from moe_optimizer.proof.record import DRAINING_FILE, PROOF_DIR, WARMING_FILE
from moe_optimizer.proof.step_count import STEPS_DIR
from moe_optimizer.specs.expert_load import LOAD_FILE, PARTS_DIR

LOCK_FILE = "launcher.lock"
LOG_FILE = "server.log"
_MAX_PID_BYTES = 20
_LEAST_FREE_BYTES = 64 * 2**20
"""Chosen: plan, proofs and the log of a start take under 2 MiB; a log is moved aside at 64."""


_FULL_BYTES = 2**20
"""Chosen: the proof of a worker with 100 layers."""


class RunFolder:
    """Files of one server, or of a group of servers with a folder below for each."""

    def __init__(self, path: Path) -> None:
        # Not Path.resolve, which raises RuntimeError on a loop of links; writing there names the loop.
        self.path = Path(os.path.realpath(path))

    @property
    def plan_path(self) -> Path:
        """Path that MOE_OPTIMIZER_PLAN names in the server's processes."""
        return self.path / PLAN_FILE

    @property
    def log_path(self) -> Path:
        """File of the server's output."""
        return self.path / LOG_FILE

    def prepare(self, plan: Plan, *, restarts: int = 0) -> None:
        """Write the plan, and remove the proofs and counts of an earlier server, and its logs if it was another run's.

        Args:
            plan: of this run.
            restarts: the logs of so many servers of this run are kept: the last one becomes server.log.RESTARTS.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            if restarts and self.log_path.exists():
                self.log_path.rename(f"{self.log_path}.{restarts}")
            for old in () if restarts else self.path.glob(f"{LOG_FILE}*"):
                old.unlink()
            write_atomically(self.plan_path, plan.to_json())
            for kept in (f"{PROOF_DIR}/*.json", f"{PARTS_DIR}/*.json", f"{STEPS_DIR}/*-*"):
                for old in self.path.glob(kept):
                    old.unlink()
            for name in (LOAD_FILE, WARMING_FILE, DRAINING_FILE):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(error) from None

    def set_warming(self, *, warming: bool) -> None:
        """Tell the processes of the server whether what it serves is only to warm it up."""
        marker = self.path / WARMING_FILE
        if warming:
            marker.touch(mode=0o600)
        else:
            marker.unlink(missing_ok=True)

    def set_draining(self) -> None:
        """Tell the API server that it ends: it takes no new requests."""
        # On a full disk new requests end with the server: no reason to leave it running.
        with contextlib.suppress(OSError):
            (self.path / DRAINING_FILE).touch(mode=0o600)

    def check(self) -> None:
        """Refuse a folder that `locked` would refuse, and leave nothing behind.

        Raises:
            InputError: another launcher holds it, it cannot be written, or its disk is nearly full.
        """
        missing = self._missing_folders()
        with self.locked():
            free = shutil.disk_usage(self.path).free
            if missing:
                (self.path / LOCK_FILE).unlink()
        _remove_empty(missing)
        if free < _LEAST_FREE_BYTES:
            raise InputError(
                f"run folder {self.path}: got {free >> 20} MiB free there, expected {_LEAST_FREE_BYTES >> 20} MiB",
                hint="make room there, or give another folder with --run-dir",
            )

    def is_full(self) -> bool:
        """Whether its disk takes no more than a proof or two."""
        try:
            return shutil.disk_usage(self.path).free < _FULL_BYTES
        except OSError:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other launcher out of the folder while the block lasts.

        Processes are told apart by their plan's path and proofs by their folder, so two runs in one folder would stop
        each other's servers and count each other's proofs. The lock ends with this process.

        Raises:
            InputError: another launcher holds it, or the folder cannot be written.
        """
        missing = self._missing_folders()
        try:
            make_private_folder(self.path)
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            _remove_empty(missing)
            raise self._refused(error) from None
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[None]:
        """Have an empty folder `name` below this one while the block lasts, readable by this user only.

        Raises:
            InputError: it cannot be created.
        """
        folder = self.path / name
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise self._refused(error) from None
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _lock(self, descriptor: int) -> None:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(f"run folder {self.path}: {LOCK_FILE} is not a regular file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(descriptor) from None
        except OSError as error:
            raise self._refused(error) from None
        if not os.fstat(descriptor).st_nlink:
            # Another launcher's `check` removed the file after it was opened: a third launcher would lock a new one.
            raise self._in_use(descriptor)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())

    def _missing_folders(self) -> list[Path]:
        """Return this folder and its parents as far as they do not exist, the innermost first."""
        return [folder for folder in (self.path, *self.path.parents) if not os.path.lexists(folder)]

    def _in_use(self, descriptor: int) -> InputError:
        holder = os.read(descriptor, _MAX_PID_BYTES).decode("ascii", errors="replace").strip()
        return InputError(
            f"run folder {self.path}: in use by process {holder or '(unknown)'}",
            hint="give this run a folder of its own with --run-dir, or stop that process",
        )

    def _refused(self, error: OSError) -> InputError:
        return InputError(f"run folder {self.path}: {error.strerror or error}")


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
