"""Workloads in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.trace import draw, loads_of
from moe_optimizer.measure.bench.workload import load_workload, workload_names

GOOD = "description: d\nrequests:\n  - {prompt: {least: 4, most: 8}, output: {least: 1, most: 2}}\nclients: [1]\n"


@pytest.mark.parametrize("name", workload_names())
def test_every_shipped_workload_is_valid_and_draws_requests(name: str):
    workload = load_workload(name)
    for load in loads_of(workload):
        requests = draw(workload, load, round_number=0)
        assert requests
        assert max(each.input_length + each.output_length for each in requests) <= workload.longest


def write(folder: Path, text: str) -> str:
    path = folder / "own.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_is_read_by_its_path(tmp_path: Path):
    assert load_workload(write(tmp_path, GOOD)).longest == 10


def test_an_unknown_name_is_an_error_with_the_nearest(tmp_path: Path):
    with pytest.raises(InputError, match="decod") as error:
        load_workload("decod")
    assert "decode" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "rates: [1]\n", "clients"),
        (GOOD.replace("clients: [1]\n", ""), "clients"),
        (GOOD.replace("most: 8", "most: 3"), "least"),
        (GOOD.replace("least: 4", "lest: 4"), "lest"),
        (GOOD + "shared_prefix: {tokens: 4}\n", "shared_prefix"),
        (GOOD + "speed: 3\n", "speed"),
        (GOOD + "prompts: corpsu\n", "prompts"),
        (GOOD.replace("least: 4", "least: 5") + "shared_prefix: {tokens: 4}\nprompts: corpus\n", "prompts"),
        ("- 1\n", "object"),
    ],
)
def test_a_wrong_workload_is_an_error_that_names_file_and_field(tmp_path: Path, text: str, named: str):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=named) as error:
        load_workload(path)
    assert path in str(error.value)
