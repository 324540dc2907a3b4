"""Drafts change no greedy answer, and the proof says how many a step checked. Sampled ones: test_draft_sampling.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.proof.record import PassProof, read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.eventually import eventually
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, Served, ask, tiny_plan


def _proven(run_dir: Path) -> PassProof:
    (holder,) = model_holders(read_proofs(run_dir))
    return holder.passes["speculation"]


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Answer, ...], PassProof]:
    """What our kernel answered with drafts from the prompt, and what its worker proved."""
    plan = tiny_plan("--enforce-eager", required=("speculation",))
    with running(plan, run_dir=tmp_path_factory.mktemp("run"), ready_timeout_s=READY_TIMEOUT_S) as info:
        answers = ask(info.base_url)
        # A worker writes at most once a second, and one that is ended writes no more.
        eventually(lambda: "3 drafts" in _proven(info.run_dir).found, "no step checked three drafts")
        return answers, _proven(info.run_dir)


def test_greedy_tokens_with_drafts_are_those_of_stock_vllm(
    stock_fp32: Served, speculating: tuple[tuple[Answer, ...], PassProof]
) -> None:
    answers, proof = speculating
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in stock_fp32.answers]
    assert (proof.applied, proof.ran, proof.why_not) == (True, True, "")
