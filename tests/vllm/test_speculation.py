"""Drafts change no greedy answer, and the proof says how many a step checked. Sampled ones: test_draft_sampling.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import Served, tiny_plan


@pytest.fixture(scope="session")
def speculating(serve_once: Callable[..., Served]) -> Served:
    """Our kernel, and drafts from the prompt."""
    return serve_once("speculating", tiny_plan("--enforce-eager", required=("speculation",)))


def test_greedy_tokens_with_drafts_are_those_of_stock_vllm(stock_fp32: Served, speculating: Served) -> None:
    assert [answer.tokens for answer in speculating.answers] == [answer.tokens for answer in stock_fp32.answers]
    (holder,) = model_holders(read_proofs(speculating.run_dir))
    entry = holder.passes["speculation"]
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert "3 drafts" in entry.found
