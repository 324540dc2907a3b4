"""Which load files may be named together."""

from __future__ import annotations

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.expert_load import read_placement_load
from tests.builders import expert_load, tiny_moe


@pytest.fixture
def files(tmp_path):
    paths = {}
    for seed in (1, 2):
        paths[seed] = str(tmp_path / f"load{seed}.json")
        (tmp_path / f"load{seed}.json").write_text(expert_load(tiny_moe(), seed=seed).to_json())
    (tmp_path / "copy.json").write_text(expert_load(tiny_moe(), seed=1).to_json())
    return paths | {"copy": str(tmp_path / "copy.json")}


def test_no_file_is_no_load():
    assert read_placement_load(None, None) is None


def test_both_are_read_with_their_paths(files):
    load = read_placement_load(files[1], files[2])
    assert load is not None
    assert load.checked_on is not None
    assert (load.placed_by.path, load.checked_on.path) == (files[1], files[2])
    assert load.placed_by.load == expert_load(tiny_moe(), seed=1)


def test_the_load_to_check_on_must_be_another_one(files):
    with pytest.raises(InputError, match="the same load"):
        read_placement_load(files[1], files["copy"])


def test_there_must_be_something_to_check(files):
    with pytest.raises(InputError, match="no load to"):
        read_placement_load(None, files[2])


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent\.json: .*No such"):
        read_placement_load(str(tmp_path / "absent.json"), None)
