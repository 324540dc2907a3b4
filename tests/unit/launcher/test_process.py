"""A server's processes: what is left of them when they are killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moe_optimizer.launcher.process import ServerProcess
from tests.eventually import eventually

SHARES_MEMORY = """
import time
from multiprocessing import shared_memory
print(shared_memory.SharedMemory(create=True, size=64).name, flush=True)
time.sleep(600)
"""


def test_killed_it_leaves_no_shared_memory(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    environment = {**os.environ, "MOE_OPTIMIZER_PLAN": str(tmp_path / "plan.json")}
    server = ServerProcess([sys.executable, "-c", SHARES_MEMORY], environment, log)
    eventually(lambda: log.read_text().endswith("\n"), "the process did not start")
    segment = Path("/dev/shm", log.read_text().strip())
    assert segment.exists()
    server.kill()
    assert server.members() == []
    assert not segment.exists()


def test_a_stop_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    log = tmp_path / "server.log"
    environment = {**os.environ, "MOE_OPTIMIZER_PLAN": str(tmp_path / "plan.json")}
    server = ServerProcess([sys.executable, "-c", deaf], environment, log)
    eventually(lambda: log.read_text().endswith("\n"), "the process did not start")

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.stop(grace_s=60.0, hurry=interrupted)
    assert server.members() == []
