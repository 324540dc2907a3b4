"""A stopped series of `bench` runs goes on where it was: servers and loads are stand-ins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.serving import bench_same

NONE = {"metric": "tpot_ms", "ratio": 1.0, "verdict": bench_same.NO_DIFFERENCE}
SLOWER = {"metric": "tpot_ms", "ratio": 1.2, "verdict": "slower"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Return the folder of each pair of servers; records go to `tmp_path`."""
    pairs: list[Path] = []

    @contextlib.contextmanager
    def servers(folder: Path) -> Iterator[list[str]]:
        pairs.append(folder)
        yield ["first", "second"]

    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(bench_same, "servers", servers)
    monkeypatch.setattr(bench_same, "vllm_version", lambda: "0.32.0")
    return pairs


def measures(monkeypatch: pytest.MonkeyPatch, *verdicts: dict[str, Any] | None) -> None:
    """Let each run of `bench` have the next verdict; None: the series is stopped in it."""
    left = iter(verdicts)

    def measured(*_: Any) -> dict[str, Any]:
        verdict = next(left)
        if verdict is None:
            raise KeyboardInterrupt
        return {"verdicts": [verdict]}

    monkeypatch.setattr(bench_same, "measured", measured)


def written(tmp_path: Path) -> dict[str, Any]:
    (path,) = (tmp_path / "records").iterdir()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_what_was_measured_before_a_stop_counts_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list[Path]
) -> None:
    arguments = ["--write", "--runs", "6", "--starts", "3", "--commit"]
    measures(monkeypatch, NONE, SLOWER, NONE, None)
    with pytest.raises(KeyboardInterrupt):
        bench_same.main([*arguments, "a"])
    assert [run["start"] for run in written(tmp_path)["runs"]] == [0, 0, 1]
    measures(monkeypatch, NONE, SLOWER, NONE)
    bench_same.main([*arguments, "b", "--resume"])
    found = written(tmp_path)
    assert [(run["start"], run["commit"]) for run in found["runs"]] == [
        (0, "a"), (0, "a"), (1, "a"), (2, "b"), (2, "b"), (3, "b"),
    ]  # fmt: skip
    assert (found["commit"], found["words"]) == (None, {bench_same.NO_DIFFERENCE: 4, "slower": 2})
    assert (found["without_a_difference"], len(started)) == (4, 4)


def test_a_record_of_something_else_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list[Path]
) -> None:
    measures(monkeypatch, NONE, NONE)
    bench_same.main(["--write", "--runs", "1", "--repetitions", "5", "--commit", "a"])
    with pytest.raises(SystemExit, match="repetitions"):
        bench_same.main(["--write", "--runs", "2", "--repetitions", "9", "--commit", "a", "--resume"])
    assert len(started) == 1


def test_no_run_begins_after_the_time(monkeypatch: pytest.MonkeyPatch, started: list[Path]) -> None:
    assert bench_same.main(["--minutes", "0", "--runs", "1", "--commit", "a"]) == 0
    assert started == []
