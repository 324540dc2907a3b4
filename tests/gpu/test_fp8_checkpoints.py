"""Our kernels on FP8 checkpoints of each method that people publish: served, with the quality of the BF16 model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_optimizer.launcher.launch import running
from moe_optimizer.ops.cuda_variants import MoeSizes, candidate_variants
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, TokenSpeeds
from tests.fp8_checkpoints import FORMS, write_fp8_checkpoint
from tests.gpu.plans import EXPERTS, always_ours, gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

pytestmark = pytest.mark.gpu

PASS, LAYERS = "flash_dmoe", 4
MAX_PERPLEXITY_RATIO = 1.02
"""Against FP32: as for online FP8."""


def ours_in_fp8(kind: str, kernel_hash: str, vllm: str) -> KernelSpeeds:
    """A table in which a kernel of ours wins everywhere, and vLLM by itself would take another backend than Triton."""
    rows = []
    for tokens in (1, 8, 64, 1024):
        sizes = MoeSizes(num_tokens=tokens, top_k=4, num_experts=EXPERTS, hidden_size=128, intermediate_size=128,
                         weight_bits=8)  # fmt: skip
        names = {str(each): 10.0 for each in candidate_variants(sizes)}
        rows.append(TokenSpeeds(tokens=tokens, stock_us=100.0, ours_us=names, peers_us={"deep_gemm": 100.0}))
    return dataclasses.replace(
        always_ours(kernel_hash, vllm), weights=f"fp8_{kind}", rows=tuple(rows), backend="deep_gemm"
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_is_served_by_our_kernels_within_the_bound(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    plan = gpu_plan(
        "--enforce-eager",
        speeds=lambda kernels, vllm: ours_in_fp8(form.scales, kernels, vllm),
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
        assert "VLLM_USE_DEEP_GEMM_E8M0=0" in rows["fp8"].ran
