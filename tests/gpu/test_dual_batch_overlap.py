"""Half of a batch computed while the other half's tokens travel through DeepEP, on two GPUs: with stock's tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from moe_optimizer.launcher.launch import running
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.gpu.plans import gpu_plan
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import PROMPTS, READY_TIMEOUT_S, Answer, ask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs DeepEP (the package deep_ep)"),
]

PASS = "dual_batch_overlap"
COPIES = ("--data-parallel-size", "2", "--enable-expert-parallel")
# DeepEP's kernels within a host, which need no NVSHMEM; vLLM splits steps of 32 tokens or more by itself.
OVERLAP = ("--all2all-backend", "deepep_high_throughput",
           "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2")  # fmt: skip


def make(*, overlapped: bool) -> Plan:
    return gpu_plan(
        "--logprobs-mode", "raw_logits", "--no-enable-prefix-caching", *COPIES, *(OVERLAP if overlapped else ()),
        wishes=resolve_wishes((PASS,) if overlapped else (), () if overlapped else (PASS,)),
        required=frozenset({PASS}) if overlapped else frozenset(),
        num_gpus=2, max_model_len=512, batch_size=16,
    )  # fmt: skip


def answers(plan: Plan, run_dir: Path) -> tuple[Answer, ...]:
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        return ask(info.base_url, PROMPTS * 2)


def test_overlapped_steps_give_stocks_tokens_up_to_ties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ours = answers(make(overlapped=True), tmp_path / "ours")
    holders = model_holders(read_proofs(tmp_path / "ours"))
    assert len(holders) == 2
    for proof in holders:
        entry = proof.passes[PASS]
        assert (entry.applied, entry.ran, entry.found, entry.why_not) == (True, True, "steps were split", "")
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    for at_stock, each in zip(answers(make(overlapped=False), tmp_path / "stock"), ours, strict=True):
        assert_same_up_to_a_tie(at_stock, each)
