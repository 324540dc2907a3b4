"""What GPUs of this machine take to exchange tensors: kept by `measure links`, read by plans."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moe_optimizer.inspection.links import keep_links, link_versions, read_links
from moe_optimizer.specs.links import Links, LinkTimes

TABLE = LinkTimes(
    device="NVIDIA H200",
    num_devices=2,
    versions=link_versions(),
    all_reduce_us={4096: 5.0, 65536: 6.0},
    gather_us={4096: 8.0, 65536: 9.0},
    source="measured here",
)


def test_what_is_kept_is_read_back_one_table_for_each_number_of_gpus_and_the_newest_counts(tmp_path: Path):
    assert read_links(tmp_path) == Links()
    again, four = dataclasses.replace(TABLE, source="later"), dataclasses.replace(TABLE, num_devices=4)
    for table in (TABLE, again, four):
        keep_links(table, tmp_path)
    assert read_links(tmp_path).tables == (again, four)
    assert read_links(tmp_path).find("NVIDIA H200", 4) == four
    assert read_links(tmp_path).find("NVIDIA H200", 8) is None
    assert read_links(tmp_path).find("NVIDIA L40S", 2) is None


@pytest.mark.parametrize(
    "change",
    [
        {"versions": "torch 1.0"},
        {"all_reduce_us": {}},
        {"all_reduce_us": {"65536": 5.0, "4096": 6.0}},
        {"gather_us": {"4096": 0.0, "65536": 9.0}},
        {"gather_us": {"4096": float("inf"), "65536": 9.0}},
        {"num_devices": "two"},
    ],
    ids=json.dumps,
)
def test_of_other_versions_and_of_what_is_no_table_nothing_is_read(tmp_path: Path, change):
    keep_links(TABLE, tmp_path)
    (path,) = tmp_path.rglob("*.json")
    file = json.loads(path.read_text(encoding="utf-8"))
    file["table"] |= change
    path.write_text(json.dumps(file), encoding="utf-8")
    assert read_links(tmp_path) == Links()
