"""Drafts change no greedy answer on a GPU: from the prompt, and of a drafting model that vLLM schedules ahead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.serving.bench_speculation import drafted
from moe_optimizer.inspection.draft_model import read_draft
from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.profiles import load_profile
from tests.gpu.at_once import Seen, asked_at_once
from tests.gpu.plans import always_ours, gpu_plan
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import TINY_MOE

pytestmark = pytest.mark.gpu

DRAFTS = 3
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32")
PLAIN, NGRAM, MODEL = "plain", "ngram", "draft"


@pytest.fixture(scope="module")
def servers(hopper: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Seen], dict[str, float]]:
    """Return what each server answered, and how many drafts each accepted."""
    folder = tmp_path_factory.mktemp("speculation")
    draft = write_draft(folder / "draft")
    accepted: dict[str, float] = {}

    def count(key: str, info: ServerInfo) -> None:
        if key != PLAIN:
            accepted[key] = drafted(info)["accepted_tokens"]

    plans = {PLAIN: plan_of(), NGRAM: plan_of("ngram"), MODEL: plan_of("draft", draft, "--async-scheduling")}
    return asked_at_once(plans, folder, then=count), accepted


def write_draft(folder: Path) -> Path:
    """Write a dense model of one layer with random weights, which has the bundled model's words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = json.loads((TINY_MOE / "config.json").read_text(encoding="utf-8"))
    config = Qwen3Config(
        vocab_size=target["vocab_size"], hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=target["num_key_value_heads"], num_key_value_heads=target["num_key_value_heads"],
        head_dim=target["head_dim"], max_position_embeddings=target["max_position_embeddings"], dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    for path in TINY_MOE.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def plan_of(method: str | None = None, draft: Path | None = None, *arguments: str) -> Plan:
    """Return a plan without drafts, or with drafts by this method."""
    profile = load_profile("balanced")
    section = profile.passes.speculation.model_copy(
        update={"method": method or "auto", "model": draft and str(draft), "draft_tokens": DRAFTS}
    )
    profile = profile.model_copy(update={"passes": profile.passes.model_copy(update={"speculation": section})})
    wishes = {"speculation": (Wish.ON if method else Wish.OFF, "test")}
    return gpu_plan(
        "--no-enable-prefix-caching", "--logprobs-mode", "raw_logits", *CAPTURE, *arguments, speeds=always_ours,
        profile=profile, wishes=wishes, required=frozenset({"speculation"} if method else ()),
        draft=read_draft(str(draft), origin="test") if draft else None, max_model_len=520, batch_size=8,
    )  # fmt: skip


@pytest.mark.parametrize("method", [NGRAM, MODEL])
def test_greedy_answers_are_those_without_drafts(
    method: str, servers: tuple[dict[str, Seen], dict[str, float]]
) -> None:
    seen, accepted = servers
    for want, got in zip(seen[PLAIN].answered(), seen[method].answered(), strict=True):
        assert_same_up_to_a_tie(want, got, spacings=2)
    proof = next(each.passes["speculation"] for each in seen[method].proofs if each.passes["flash_dmoe"].layers)
    assert (proof.applied, proof.ran, proof.why_not) == (True, True, "")
    # Random weights draft, of which hardly any is accepted; code repeats itself.
    assert method == MODEL or accepted[method] > 0
