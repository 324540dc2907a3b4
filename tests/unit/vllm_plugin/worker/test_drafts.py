"""The drafts that a worker's steps check, against the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.plan.pass_params import SpeculationParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import PassProof
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker import drafts
from moe_optimizer.vllm_plugin.worker.drafts import await_drafts, draft_differences, note_drafts
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe

PASS = "speculation"
PLAN: Plan = made_plan(tiny_moe(), cpu_machine(), profile_with(passes={PASS: {"mode": "on"}}))


@pytest.fixture
def proof(tmp_path: Path) -> Iterator[PassProof]:
    session = PluginSession(run_dir=tmp_path, plan=PLAN)
    session.proof.passes[PASS] = PassProof(requested="ngram, 3 drafts")
    await_drafts(session, PLAN.decision(PASS))
    yield session.proof.passes[PASS]
    drafts._awaited = None


def step(*counts: int) -> Any:
    return SimpleNamespace(scheduled_spec_decode_tokens={str(i): [-1] * count for i, count in enumerate(counts)})


def test_the_proof_names_the_most_drafts_that_a_step_checked(proof):
    note_drafts(step())
    before = proof.found
    note_drafts(step(1, 2))
    note_drafts(step(1))
    assert "no draft" in before
    assert "2 drafts" in proof.found


def configured(**changes: Any) -> Any:
    stated = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": None}
    return SimpleNamespace(**(stated | changes))


PLANNED = SpeculationParams(method="ngram", draft_tokens=3)
BY_REQUESTS = SpeculationParams(method="ngram", draft_tokens=3, by_requests=((1, 4, 3), (5, 8, 1)))


def test_vllm_that_runs_as_planned_differs_in_nothing():
    assert draft_differences(PLANNED, configured()) == ()
    ranges = [(1, 4, 3), [5, 8, 1]]
    assert draft_differences(BY_REQUESTS, configured(num_speculative_tokens_per_batch_size=ranges)) == ()


@pytest.mark.parametrize(
    ("params", "config", "said"),
    [
        (PLANNED, None, "without drafts"),
        (PLANNED, configured(method="suffix"), "suffix"),
        (PLANNED, configured(num_speculative_tokens=2), "checks 2"),
        (BY_REQUESTS, configured(), "number of requests"),
    ],
)
def test_what_vllm_changed_is_named(params, config, said):
    (found,) = draft_differences(params, config)
    assert said in found
