from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import record


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.0GHz", "xeon-platinum-8480c"),
        ("AMD EPYC 9654 96-Core Processor", "epyc-9654"),
        ("", "cpu"),
    ],
)
def test_the_processors_name_becomes_part_of_a_file_name(name: str, slug: str) -> None:
    assert record.cpu_slug(name) == slug


def test_a_checkout_that_git_cannot_read_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.checkout() == {"commit": None, "dirty": None}


def test_a_named_commit_keeps_its_dirty_mark() -> None:
    assert record.checkout("abc") == {"commit": "abc", "dirty": False}
    assert record.checkout("abc+dirty") == {"commit": "abc", "dirty": True}


def test_a_record_is_written_under_its_date_machine_and_subject(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    record.write_record({"date": "2026-11-20"}, "epyc", "cli_startup")
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["2026-11-20_epyc_cli_startup.json"]
