"""Counts a worker's steps in a file that other processes read meanwhile: forward progress, whatever /health says."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.files import make_private_folder
from moe_optimizer.proof.record import Proof

STEPS_DIR = "steps"
"""Below the run folder: a file for each worker, named after its rank and process."""
AGE_METRIC = "moe_optimizer_last_step_age_seconds"
_FORM = struct.Struct("<Qd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The progress of one worker."""

    worker: str
    """Rank and process id: "0-4711"."""
    count: int
    last_at: float
    """When the last step began, in seconds since 1970."""


class StepCount:
    """The count of the worker that writes a proof, in memory shared with its file: a step makes no system call.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, run_dir: Path, proof: Proof) -> None:
        path = run_dir / STEPS_DIR / worker_name(proof)
        make_private_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Written, not only made longer: a page without a place on a full disk would end the process.
            os.write(descriptor, bytes(_FORM.size))
            self._memory = mmap.mmap(descriptor, _FORM.size)
        finally:
            os.close(descriptor)
        self._count = 0

    def step(self) -> None:
        """Note that a step begins."""
        self._count += 1
        _FORM.pack_into(self._memory, 0, self._count, time.time())


def worker_name(proof: Proof) -> str:
    """Return what the file of the worker that wrote a proof is called."""
    return f"{proof.model_rank}-{proof.pid}"


def read_steps(run_dir: Path) -> Iterator[Steps]:
    """Yield the progress of each worker that has made a step, by name."""
    for path in sorted((run_dir / STEPS_DIR).glob("*-*")):
        with contextlib.suppress(OSError, struct.error):
            count, last_at = _FORM.unpack(path.read_bytes())
            if count:
                yield Steps(worker=path.name, count=count, last_at=last_at)
