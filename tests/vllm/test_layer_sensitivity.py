"""FP8's change of each layer on a text, measured by vLLM, and what a plan makes of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_optimizer.inspection.layer_sensitivity import read_sensitivity_file
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.specs.layer_sensitivity import LayerSensitivityFile
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe
from tests.vllm.conftest import TINY_MOE

COMMAND = [sys.executable, "-m", "moe_optimizer", "measure", "fp8-sensitivity", str(TINY_MOE)]


@pytest.fixture(scope="module")
def sensitivity(tmp_path_factory: pytest.TempPathFactory) -> LayerSensitivityFile:
    path = tmp_path_factory.mktemp("sensitivity") / "s.json"
    command = [*COMMAND, "--text", str(TINY_MOE / "heldout.txt"), "--output", str(path)]
    done = subprocess.run([*command, "--max-tokens", "1500"], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1500 tokens; written to" in done.stdout
    found = read_sensitivity_file(str(path), "fp8")
    assert found is not None
    return found


def test_every_layer_is_measured_on_the_text(sensitivity: LayerSensitivityFile) -> None:
    measured = sensitivity.measured
    assert (measured.model, measured.weights, measured.tokens) == ("tiny-moe", "fp8_block", 1500)
    assert list(measured.errors) == [0, 1, 2, 3]
    assert all(0.01 < error < 0.05 for error in measured.errors.values())


def test_the_plan_keeps_what_changes_more_than_the_budget(sensitivity: LayerSensitivityFile) -> None:
    errors = sensitivity.measured.errors
    worst = max(errors, key=lambda layer: errors[layer])
    second = sorted(errors.values())[-2]
    profile = profile_with("balanced", {"fp8": {"max_layer_error": (errors[worst] + second) / 2}})
    plan = made_plan(tiny_moe(), cpu_machine(), profile, wishes={"fp8": (Wish.ON, "test")}, fp8_sensitivity=sensitivity)
    assert plan.decision("fp8").params_as(Fp8Params).excluded_layers == (worst,)
