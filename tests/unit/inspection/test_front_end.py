"""What an API server of this machine takes for a token: kept by `bench`, read by plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.inspection.front_end import keep_front_end, read_front_end
from moe_optimizer.specs.quantity import Source


def test_what_is_kept_is_read_back_and_the_newest_counts(tmp_path: Path):
    assert read_front_end("0.26.0", tmp_path) is None
    for us in (88.0, 62.0):
        keep_front_end(us, found="512 clients", vllm="0.26.0", cache=tmp_path)
    known = read_front_end("0.26.0", tmp_path)
    assert known is not None
    assert (known.value, known.unit, known.source) == (62.0, "us", Source.MEASURED)
    assert "512 clients" in known.ref


def test_another_version_of_vllm_knows_nothing_of_it(tmp_path: Path):
    keep_front_end(62.0, found="512 clients", vllm="0.26.0", cache=tmp_path)
    assert read_front_end("0.32.0", tmp_path) is None


@pytest.mark.parametrize(
    "change", [{"cpu": "another"}, {"us_per_token": 0}, {"us_per_token": "62"}, {"schema_version": 2}]
)
def test_a_file_of_another_machine_or_that_is_damaged_counts_as_none(tmp_path: Path, change: dict[str, object]):
    path = keep_front_end(62.0, found="512 clients", vllm="0.26.0", cache=tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_front_end("0.26.0", tmp_path) is None
    path.write_text("{")
    assert read_front_end("0.26.0", tmp_path) is None
