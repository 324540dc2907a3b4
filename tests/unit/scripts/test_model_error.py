"""How wrong the predictions are: the page is the one that the script writes, and a limit on the error is kept."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "model_error.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_error", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_error"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_records_and_predictions_are_within_a_tenth(script: ModuleType) -> None:
    assert script.main(["--check", "--max-model-error", "0.1"]) == 0


def test_a_limit_that_is_not_kept_fails_and_names_what_is_off(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--check", "--max-model-error", "0.001"]) == 1
    said = capsys.readouterr().out
    assert "gain of flash_dmoe" in said
    assert "gain of fp8" in said


def test_what_a_pass_gains_is_compared_with_the_same_load_without_it(script: ModuleType) -> None:
    found = list(script.cases())
    sides = {(case.record, case.side, case.clients): case for case in found}
    base, fp8 = (sides["2026-11-21_h200_served", side, 8] for side in ("stock", "fp8"))
    assert base.tpot_ms / fp8.tpot_ms in [each.measured for each in script.by_pass(found)["fp8"]]
