"""What `inspect` shows of a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moe_optimizer.cli.inspect import render_model
from moe_optimizer.cli.main import main
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.specs.model import ModelSpec

TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return dataclasses.replace(ModelInspector().inspect(TINY_MOE), name="tiny", path="tiny")


def test_experts_of_a_moe_model_are_shown(tiny: ModelSpec) -> None:
    shown = render_model(tiny, width=80)
    assert "4 MoE layers" in shown
    assert "16 per " in shown
    assert "4 used" in shown


def test_a_dense_model_shows_no_experts(tiny: ModelSpec) -> None:
    dense = dataclasses.replace(tiny, is_moe=False, num_experts=0, top_k=0, moe_layers=())
    shown = render_model(dense, width=80)
    assert "kind" in shown
    assert "dense" in shown
    assert "experts" not in shown


def test_parameters_in_all_and_of_one_token_are_told_apart(tiny: ModelSpec) -> None:
    large = dataclasses.replace(tiny, total_params=30_532_122_624, active_params=3_345_000_000)
    (parameters,) = [line for line in render_model(large, width=80).splitlines() if line.startswith("parameters")]
    assert "30.5 G" in parameters
    assert "3.35 G" in parameters


def test_a_model_that_needs_code_of_its_own_says_with_which_flag(tiny: ModelSpec) -> None:
    assert "--trust-remote-code" not in render_model(tiny, width=80)
    own = dataclasses.replace(tiny, needs_remote_code=True)
    assert "yes, with --trust-remote-code: " in render_model(own, width=80)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_asked(tiny: ModelSpec, width: int) -> None:
    long = dataclasses.replace(tiny, servable=False, servable_reason="this vLLM does not have it " * 12)
    assert max(map(len, render_model(long, width=width).splitlines())) <= width


def test_escape_sequences_in_a_name_are_written_out(tiny: ModelSpec) -> None:
    assert "\x1b" not in render_model(dataclasses.replace(tiny, architecture="\x1b[2J"), width=80)


def test_warnings_go_to_stderr_one_a_line(
    tiny: ModelSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warned = dataclasses.replace(tiny, warnings=("first", "second"))
    monkeypatch.setattr(ModelInspector, "inspect", lambda *_: warned)
    assert main(["inspect", "x", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["warning: first", "warning: second"]
    assert json.loads(shown.out)["warnings"] == ["first", "second"]
