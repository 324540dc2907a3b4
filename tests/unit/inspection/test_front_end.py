"""What API servers of this machine take for a token: kept by `bench`, read by plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.inspection.front_end import keep_front_end, read_front_end
from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime

VLLM = "0.26.0"


def time_of(clients: int, us: float) -> FrontEndTime:
    return FrontEndTime(clients=clients, us_per_token=us, found="`bench`, 2026-11-28")


def keep(folder: Path, *, measured: tuple[FrontEndTime, ...] = (), at_most: tuple[FrontEndTime, ...] = ()) -> None:
    keep_front_end(measured, at_most, vllm=VLLM, cache=folder)


def test_what_is_kept_is_read_back_and_the_newest_of_a_load_counts(tmp_path: Path):
    assert read_front_end(VLLM, tmp_path) == FrontEnd()
    keep(tmp_path, measured=(time_of(512, 88.0), time_of(128, 40.0)))
    keep(tmp_path, measured=(time_of(512, 62.0),))
    assert read_front_end(VLLM, tmp_path).times == (time_of(128, 40.0), time_of(512, 62.0))


def test_a_load_that_an_api_server_kept_up_with_lowers_what_was_known_above_it_of_as_many_clients_or_fewer(
    tmp_path: Path,
):
    keep(tmp_path, measured=(time_of(128, 70.0), time_of(256, 85.0), time_of(512, 88.0), time_of(1024, 90.0)))
    keep(tmp_path, at_most=(time_of(512, 80.0),))
    found = [(each.clients, each.us_per_token) for each in read_front_end(VLLM, tmp_path).times]
    assert found == [(128, 70.0), (256, 80.0), (512, 80.0), (1024, 90.0)]


def test_nothing_is_written_where_nothing_is_new(tmp_path: Path):
    keep(tmp_path / "none", at_most=(time_of(512, 80.0),))
    assert not (tmp_path / "none").exists()


def test_another_version_of_vllm_knows_nothing_of_it(tmp_path: Path):
    keep(tmp_path, measured=(time_of(512, 62.0),))
    assert read_front_end("0.32.0", tmp_path) == FrontEnd()


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": "another"},
        {"times": [{"clients": 512, "us_per_token": 0.0, "found": ""}]},
        {"times": [{"clients": 512, "us_per_token": "62", "found": ""}]},
        {"times": [{"clients": 512, "us_per_token": float("inf"), "found": ""}]},
        {"times": [{"clients": 512, "us_per_token": 1e300, "found": ""}]},
        {"times": [{"clients": 512, "us_per_token": 62.0, "found": "\x1b[31m"}]},
        {"cores": 1000},
        {"schema_version": 2},
    ],
)
def test_a_file_of_another_machine_or_that_is_damaged_counts_as_none(tmp_path: Path, change: dict[str, object]):
    keep(tmp_path, measured=(time_of(512, 62.0),))
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_front_end(VLLM, tmp_path) == FrontEnd()
    path.write_text("{")
    assert read_front_end(VLLM, tmp_path) == FrontEnd()
    keep(tmp_path, measured=(time_of(512, 62.0),))
    assert read_front_end(VLLM, tmp_path).times == (time_of(512, 62.0),)
