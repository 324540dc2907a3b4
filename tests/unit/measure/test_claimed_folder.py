"""A folder of samples belongs to one question: what is served and asked, whatever the reasons for it say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.side import Side
from moe_optimizer.measure.claimed_folder import claim_folder, make_run_folder
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe

PLAN = made_plan(tiny_moe(), cpu_machine(), profile_with())


def test_the_same_question_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, {"a": 1, "b": [2]}, command="bench")
    claim_folder(folder, {"b": [2], "a": 1}, command="bench")
    with pytest.raises(InputError, match="--run-dir"):
        claim_folder(folder, {"a": 2, "b": [2]}, command="bench")
    claim_folder(folder, {"a": 2, "b": [2]}, command="quality")


def test_a_plan_with_other_reasons_serves_the_same() -> None:
    first, *others = PLAN.decisions
    told = PLAN.replace(decisions=(dataclasses.replace(first, reason="judged meanwhile"), *others))
    assert Side(name="x", plan=told).served == Side(name="x", plan=PLAN).served


def test_a_plan_with_other_arguments_or_decisions_serves_something_else() -> None:
    served = Side(name="x", plan=PLAN).served
    longer = PLAN.replace(serve_args=PLAN.serve_args + ServeArguments("--max-num-seqs", "3"))
    first, *others = PLAN.decisions
    valued = PLAN.replace(decisions=(dataclasses.replace(first, value="another"), *others))
    assert served not in (Side(name="x", plan=longer).served, Side(name="x", plan=valued).served)
    assert Side(name="x", plan=None, url="http://127.0.0.1:1").served is None


def test_a_file_in_its_place_is_refused(tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(InputError, match="expected a folder"):
        make_run_folder(place)
    with pytest.raises(InputError, match="expected a folder"):
        claim_folder(place / "below", {}, command="bench")
