"""Our kernels on two GPUs where vLLM exchanges tokens between ranks or moves experts: they run, with stock's tokens."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.specs.kernel_speeds import KernelSpeeds
from tests.gpu.plans import EXPERTS, always_ours, gpu_plan
from tests.vllm import wrong_kernels
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import FORKED, READY_TIMEOUT_S, Answer, ask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PASS = "flash_dmoe"
LAYOUTS = {
    "DP+EP": ("--data-parallel-size", "2", "--enable-expert-parallel"),
    "EPLB": ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config",
             '{"window_size": 4, "step_interval": 8, "num_redundant_experts": 0}'),
}  # fmt: skip
"""Layouts in which each GPU holds half of the experts; the load balancer moves them every few steps."""
SEEN_WITHIN_S = 120.0


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
    if layout == "EPLB":
        for entry in holding:
            assert re.match(
                r"passed after \d+ rearr.* layer each, the last \S+, worst.*; passed before ready", entry.canary
            )
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    for at_stock, each in zip(answers(plan, tmp_path / "stock"), ours, strict=True):
        assert_same_up_to_a_tie(at_stock, each)


def test_experts_that_vllm_puts_into_wrong_rows_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, switch, run_dir = tmp_path / "site", tmp_path / "mistake", tmp_path / "run"
    site.mkdir()
    switch.write_text("")
    shutil.copy(wrong_kernels.__file__, site / "sitecustomize.py")
    shutil.copy(FORKED / "after_import.py", site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("MOE_TEST_FAULT_FILE", str(switch))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def canaries() -> list[str]:
        return [proof.passes[PASS].canary for proof in read_proofs(run_dir) if PASS in proof.passes]

    with running(make("EPLB"), run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        ask(info.base_url)
        switch.write_text("misplaced")
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not any(canary.startswith("failed after a rearrangement") for canary in canaries()):
            assert time.monotonic() < deadline, canaries()
            # The server ends in the middle of it.
            with contextlib.suppress(OSError):
                ask(info.base_url)
