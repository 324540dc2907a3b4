"""Drafts change no greedy answer, and the proof says how many a step checked. Sampled ones: test_draft_sampling.py.

That the tokens are those of stock vLLM is asserted where the other servers' are (test_serving_equals_stock.py).
"""

from __future__ import annotations

from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.vllm.conftest import Served


def test_steps_checked_the_planned_drafts_in_every_worker(ours_expert_parallel: Served) -> None:
    # Those of the start were read before anything was drafted.
    holders = model_holders(read_proofs(ours_expert_parallel.run_dir))
    assert len(holders) == 2
    for holder in holders:
        proof = holder.passes["speculation"]
        assert (proof.applied, proof.ran, proof.why_not) == (True, True, "")
        assert "3 drafts" in proof.found
