"""A reader never sees half a file."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_optimizer.files import write_atomically
from tests.eventually import eventually


def test_writes_the_text_and_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_atomically(path, "{}\n")
    assert path.read_text() == "{}\n"


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "private" / "plan.json"
    write_atomically(path, "x")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \udcff")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code = (
        "import sys, pathlib; from moe_optimizer.files import write_atomically\n"
        "i = 0\n"
        "while True: i += 1; write_atomically(pathlib.Path(sys.argv[1]), str(i) * 200_000 + 'END')"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        eventually(path.exists, "the writer wrote nothing")
        time.sleep(0.2)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert path.read_text().endswith("END")
