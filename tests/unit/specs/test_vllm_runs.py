from __future__ import annotations

from typing import Literal

import pytest

from moe_optimizer.specs.vllm_runs import VllmRun, VllmRuns


def run(version: str, device: Literal["cpu", "cuda"] = "cuda") -> VllmRun:
    return VllmRun(version=version, device=device, machine="", ran="", date="", evidence="")


RUNS = VllmRuns(runs=(run("0.9.2"), run("0.26.0"), run("0.26.0"), run("0.32.0", "cpu")))


def test_versions_are_of_one_device_the_newest_first_by_number() -> None:
    assert RUNS.versions("cuda") == ("0.26.0", "0.9.2")


@pytest.mark.parametrize(
    ("version", "device", "untried"),
    [
        ("0.26.0", "cuda", False),
        ("0.26.0+cu130", "cuda", False),
        ("0.26.1", "cuda", True),
        ("0.32.0", "cuda", True),
        ("0.32.0", "cpu", False),
        ("0.26.0", "unknown", True),
        ("", "cuda", True),
    ],
)
def test_a_version_counts_as_run_only_on_its_device(version: str, device: str, untried: bool) -> None:
    assert bool(RUNS.why_untried(version, device)) == untried


def test_the_versions_that_were_run_are_named() -> None:
    assert RUNS.why_untried("0.33.0", "cuda").endswith(" 0.26.0, 0.9.2")


def test_nothing_is_said_without_a_table() -> None:
    assert VllmRuns().why_untried("0.33.0", "cuda") == ""
