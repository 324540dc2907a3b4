"""A server's processes: what is left of them when they are killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
