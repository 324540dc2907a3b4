"""Our kernels on FP8 checkpoints of each method that people publish: served, with the quality of the BF16 model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_optimizer.launcher.launch import running
from moe_optimizer.proof.record import read_proofs
from tests.fp8_checkpoints import FORMS, write_fp8_checkpoint
from tests.gpu.plans import always_ours_in_fp8, gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

pytestmark = pytest.mark.gpu

PASS, LAYERS = "flash_dmoe", 4
MAX_PERPLEXITY_RATIO = 1.02
"""Against FP32: as for online FP8."""


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_is_served_by_our_kernels_within_the_bound(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    plan = gpu_plan(
        "--enforce-eager",
        speeds=lambda kernels, vllm: always_ours_in_fp8(form.scales, kernels, vllm),
        model=write_fp8_checkpoint(form, tmp_path / "model"),
        max_model_len=520,
        batch_size=8,
    )
    assert "--moe-backend triton" in " ".join(plan.decision(PASS).vllm_args.words)
    with running(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S) as info:
        measured = heldout_perplexity(info)
        rows = {row.pass_name: row for row in info.rows}
    entries = [proof.passes[PASS] for proof in read_proofs(tmp_path / "run") if PASS in proof.passes]
    (entry,) = [entry for entry in entries if entry.layers]
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert len(entry.layers) == LAYERS
    assert all(layer.calls and layer.self_check_error is not None for layer in entry.layers)
    assert measured < reference_perplexity() * MAX_PERPLEXITY_RATIO
    if form.scales == "block" and torch.cuda.get_device_capability() == (9, 0):
        assert "VLLM_USE_DEEP_GEMM_E8M0=0" in rows["fp8"].why_not
