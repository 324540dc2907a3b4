"""FP8 experts are recognised in the files of every method, and planned for as they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.plan.pass_params import FlashDmoeParams
from tests.builders import gpus, made_plan, software
from tests.fp8_checkpoints import FORMS, write_fp8_checkpoint


@pytest.mark.parametrize("name", FORMS)
def test_experts_in_fp8_ask_for_the_speeds_of_their_own_kind_of_scales(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    model = ModelInspector().inspect(write_fp8_checkpoint(form, tmp_path / "model"))
    assert (model.expert_format, model.fp8_scales) == ("fp8", form.scales)
    built = software("cuda", cuda_ops=("fused_experts",))
    decision = made_plan(model, gpus("h100_sxm", 1), software=built).decision("flash_dmoe")
    (question,) = decision.params_as(FlashDmoeParams).measure
    assert question.weights == f"fp8_{form.scales}"
