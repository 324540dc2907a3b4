"""Which folder a command that measures takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.cli.run_folder import run_folder
from moe_optimizer.errors import InputError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_that_is_not_gone_on_with_has_a_new_folder() -> None:
    Path("runs/bench-20260101-000000").mkdir(parents=True)
    assert run_folder("mine", "bench", resume=False) == Path("mine")
    assert not run_folder(None, "bench", resume=False).exists()


def test_the_newest_run_of_the_same_command_is_gone_on_with() -> None:
    for name in ("bench-20260101-000000", "bench-20260102-000000", "bench-20260101-235959", "tune-20270101-000000"):
        Path("runs", name).mkdir(parents=True)
    assert run_folder(None, "bench", resume=True) == Path("runs/bench-20260102-000000")


def test_the_folder_that_is_named_is_gone_on_with() -> None:
    Path("runs/bench-20260101-000000").mkdir(parents=True)
    Path("mine/samples").mkdir(parents=True)
    assert run_folder("mine", "bench", resume=True) == Path("mine")


@pytest.mark.parametrize("named", [None, "mine", "empty"])
def test_where_there_is_no_run_to_go_on_with_it_is_refused(named: str | None) -> None:
    Path("empty").mkdir()
    with pytest.raises(InputError, match="--resume"):
        run_folder(named, "bench", resume=True)
