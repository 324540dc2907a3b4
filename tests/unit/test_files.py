"""Files are read within a bound, and a reader never sees half of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.files import make_private_folder, read_bytes, read_text, write_atomically
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


def test_nobody_else_can_list_a_folder_that_is_made_above_it(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "proof" / "worker.json"
    write_atomically(path, "x")
    assert {folder.stat().st_mode & 0o777 for folder in path.parents[:3]} == {0o700}


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    write_atomically(folder / "mine" / "plan.json", "x")
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_above_it_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    mkdir = Path.mkdir

    def removed_before(path: Path, **options: Any) -> None:
        monkeypatch.setattr(Path, "mkdir", mkdir)
        runs.rmdir()
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", removed_before)
    make_private_folder(runs / "mine")
    assert (runs / "mine").is_dir()


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


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    assert read_bytes(tmp_path / "a", max_bytes=3) == b"abc"
    with pytest.raises(InputError, match=r"3 bytes,.* 2$"):
        read_bytes(tmp_path / "a", max_bytes=2)


def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match=f"^{path}: .*regular file"):
            read_bytes(path, max_bytes=10)


def test_a_file_that_cannot_be_read_is_called_by_its_name_and_looked_for_where_the_hint_says(tmp_path: Path) -> None:
    for name, reason in (("absent", "No such file"), ("null\0", "null")):
        with pytest.raises(InputError, match=f"^the plan: .*{reason}") as error:
            read_text(tmp_path / name, max_bytes=10, name="the plan")
        assert str(tmp_path) in str(error.value.hint)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"byte 2 .*UTF-8"):
        read_text(tmp_path / "a", max_bytes=10)
