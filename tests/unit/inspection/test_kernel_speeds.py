"""Tables on disk: shipped and measured, whole or not used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.kernel_speeds import (
    measured_dir,
    read_kernel_speeds,
    read_tables,
    shipped_dir,
    write_tables,
)
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, TokenSpeeds
from tests.builders import kernel_speeds


def table(**changes: Any) -> KernelSpeeds:
    return kernel_speeds(TokenSpeeds(tokens=1, stock_us=2.0, ours_us={"direct": 1.0}), **changes)


def test_what_is_written_is_read_back_after_what_is_shipped(tmp_path: Path):
    write_tables(tmp_path / "mine.json", (table(),))
    speeds = read_kernel_speeds(tmp_path)
    assert speeds.tables[-1] == table()
    assert speeds.warnings == ()


def test_the_shipped_tables_are_whole_and_name_records_that_exist():
    paths = sorted(shipped_dir().glob("*.json"))
    assert paths
    for path in paths:
        for each in read_tables(path):
            assert (shipped_dir().parents[1] / each.source).is_file()
            assert each.kernel_hash


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON list"),
        ('{"schema_version": 2, "tables": []}', "schema_version: got 2, expected 1"),
        ('{"schema_version": 1, "tables": {}}', "tables: got dict"),
        ('{"schema_version": 1, "tables": [{}]}', "'device' is missing"),
        ("\x00" * 10, "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_no_table_is_a_warning_and_the_rest_is_used(tmp_path: Path, text: str, why: str):
    (tmp_path / "bad.json").write_text(text)
    write_tables(tmp_path / "good.json", (table(),))
    speeds = read_kernel_speeds(tmp_path)
    assert speeds.tables[-1] == table()
    (warning,) = speeds.warnings
    assert "bad.json" in warning
    assert why in warning


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (TokenSpeeds(tokens=0, stock_us=1.0, ours_us={}),),
        (TokenSpeeds(tokens=2, stock_us=1.0, ours_us={}), TokenSpeeds(tokens=1, stock_us=1.0, ours_us={})),
        (TokenSpeeds(tokens=1, stock_us=0.0, ours_us={}),),
        (TokenSpeeds(tokens=1, stock_us=1.0, ours_us={"direct": -1.0}),),
    ],
)
def test_rows_that_cannot_be_measurements_are_refused(tmp_path: Path, rows: tuple[TokenSpeeds, ...]):
    write_tables(tmp_path / "bad.json", (table(rows=rows),))
    with pytest.raises(InputError, match="rows: expected"):
        read_tables(tmp_path / "bad.json")


def test_the_users_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured_dir() == tmp_path / "moe-optimizer" / "kernel_speeds"


def test_a_pipe_among_the_tables_is_a_warning(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.json")
    (warning,) = read_kernel_speeds(tmp_path).warnings
    assert "pipe.json" in warning


def test_a_cache_that_cannot_be_read_is_a_warning(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    read = read_kernel_speeds(tmp_path / "loop")
    assert read.tables == read_kernel_speeds(tmp_path / "none").tables
    (warning,) = read.warnings
    assert str(tmp_path / "loop") in warning


def test_a_table_file_is_json_that_a_person_can_read(tmp_path: Path):
    write_tables(tmp_path / "mine.json", (table(),))
    data = json.loads((tmp_path / "mine.json").read_text())
    assert data["tables"][0]["rows"] == [
        {"tokens": 1, "stock_us": 2.0, "ours_us": {"direct": 1.0}, "peers_us": {}, "even_us": {}}
    ]
