"""Our kernels on two GPUs where vLLM exchanges tokens between ranks or moves experts: they run, with stock's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.specs.kernel_speeds import KernelSpeeds
from tests.gpu.plans import EXPERTS, always_ours, gpu_plan
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PASS = "flash_dmoe"
LAYOUTS = {
    "DP+EP": ("--data-parallel-size", "2", "--enable-expert-parallel"),
    "EPLB": ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config",
             '{"window_size": 4, "step_interval": 8, "num_redundant_experts": 0}'),
}  # fmt: skip
"""Layouts in which each GPU holds half of the experts; the load balancer moves them every few steps."""


def half(kernel_hash: str, vllm: str) -> KernelSpeeds:
    return always_ours(kernel_hash, vllm, num_experts=EXPERTS // 2)


def make(layout: str) -> Plan:
    return gpu_plan(
        "--logprobs-mode", "raw_logits", "--no-enable-prefix-caching", *LAYOUTS[layout],
        speeds=half, num_gpus=2, max_model_len=512, batch_size=16,
    )  # fmt: skip


def answers(plan: Plan, run_dir: Path) -> tuple[Answer, ...]:
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        return ask(info.base_url)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_tokens_are_stocks_up_to_ties(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plan = make(layout)
    ours = answers(plan, tmp_path / "ours")
    entries = [proof.passes[PASS] for proof in read_proofs(tmp_path / "ours") if PASS in proof.passes]
    holding = [entry for entry in entries if entry.layers]
    assert len(holding) == 2
    for entry in holding:
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert all(layer.calls and layer.expert_map for layer in entry.layers)
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    for at_stock, each in zip(answers(plan, tmp_path / "stock"), ours, strict=True):
        assert_same_up_to_a_tie(at_stock, each)
