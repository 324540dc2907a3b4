"""Finding the reason of a failure in vLLM's log."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.vllm_plugin.server_log import root_cause

LOG = """\
(APIServer pid=1) INFO 01-01 00:00:00 [utils.py:1] starting
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:953]     raise ValueError(f"Error: {x}")
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:953] torch.OutOfMemoryError: no room for 3 GiB
(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1] Exception: WorkerProc initialization failed due to an exception
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_told_from_its_consequences(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    assert root_cause(path) == "torch.OutOfMemoryError: no room for 3 GiB"


def test_a_log_without_exception_has_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("INFO all is well\n")
    assert root_cause(path) == ""
    assert root_cause(tmp_path / "missing.log") == ""


def test_escapes_from_the_log_are_written_out(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"ValueError: \x1b[2J\xff\n")
    assert root_cause(path).startswith("ValueError: \\x1b[2J")
