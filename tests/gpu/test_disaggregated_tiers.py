"""Prefill and decode on a GPU each, the cache between them by NIXL, and a tier in host memory beside each: served once.

Eager and with few blocks, because what is shown is where a prompt's blocks go and from where they come back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.kv_transfer import received_tokens
from moe_optimizer.launcher.launch import ServerInfo, running
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.pass_params import KvCacheParams
from tests.free_ports import free_ports
from tests.gpu.plans import gpu_plan
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus_and_nixl")]

GPUS = 2
BLOCK, BLOCKS = 16, 48
LENGTH = 400
"""25 blocks: a second and a third prompt push out the first, on both servers."""
STORED = LENGTH // BLOCK * BLOCK - BLOCK
"""Tokens that must come back, at least: the last block may be computed again."""
ROUNDING = 4
"""BF16 spacings: one server computes the last token of a prompt with the others, the decode server by itself."""


@dataclass
class Seen:
    """What the servers answered, and how many tokens each had from another process for it."""

    info: ServerInfo | None = None
    first: list[Answer] = field(default_factory=list)
    """Through the router, to each prompt."""
    again: Answer | None = None
    """Through the router, to the first prompt, which neither GPU had any more."""
    here: Answer | None = None
    """By the decode server alone, to the first prompt, pushed out of its GPU once more."""
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each of these requests, by the prefill and by the decode server."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve and ask."""
    asked = ("disaggregation", "kv-tiering")
    plan = gpu_plan(
        "--logprobs-mode", "raw_logits", "--enforce-eager",
        "--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK),
        wishes=resolve_wishes(asked, ()),
        required=frozenset({"disaggregation", "kv_cache.tiering"}),
        port=free_ports(4),
        max_model_len=512,
        batch_size=8,
        num_gpus=GPUS,
    )  # fmt: skip
    assert plan.decision("kv_cache").params_as(KvCacheParams).offload_gib
    prompts = [random.Random(seed).choices(range(20, 800), k=LENGTH) for seed in range(3)]
    seen = Seen()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        with running(plan, run_dir=tmp_path_factory.mktemp("run") / "group", ready_timeout_s=READY_TIMEOUT_S) as info:
            seen.info = info
            prefill, decode = info.servers

            def received() -> tuple[int, int]:
                before, after = (received_tokens(ServerClient(server.base_url)) for server in (prefill, decode))
                return before, after

            def asked_of(url: str, prompt: list[int], name: str) -> Answer:
                before = received()
                (answer,) = ask(url, [prompt])
                after = received()
                seen.received[name] = (after[0] - before[0], after[1] - before[1])
                return answer

            seen.first = [asked_of(info.base_url, prompt, f"first {i}") for i, prompt in enumerate(prompts)]
            seen.again = asked_of(info.base_url, prompts[0], "again")
            for prompt in prompts[1:]:
                ask(info.base_url, [prompt])
            seen.here = asked_of(decode.base_url, prompts[0], "here")
    return seen


def test_both_connectors_ran_before_the_servers_counted_as_ready(seen: Seen) -> None:
    assert seen.info is not None
    rows = {row.pass_name: row for row in seen.info.rows}
    assert rows["disaggregation"].ran.startswith("yes, ")
    assert "in each host tier" in rows["kv_cache"].ran
    assert [rows[name].why_not for name in ("disaggregation", "kv_cache")] == ["", ""]


def test_a_new_prompt_travels_whole(seen: Seen) -> None:
    assert [seen.received[f"first {i}"] for i in range(3)] == [(0, LENGTH)] * 3


def test_a_prompt_that_left_both_gpus_comes_from_the_tier_of_prefill_and_travels(seen: Seen) -> None:
    from_tier, travelled = seen.received["again"]
    assert from_tier >= STORED
    assert travelled == LENGTH
    assert seen.again is not None
    assert_same_up_to_a_tie(seen.first[0], seen.again, spacings=ROUNDING)


def test_what_travelled_comes_back_from_the_tier_of_decode(seen: Seen) -> None:
    from_other_server, from_tier = seen.received["here"]
    assert from_other_server == 0
    assert from_tier >= STORED
    assert seen.here is not None
    assert_same_up_to_a_tie(seen.first[0], seen.here, spacings=ROUNDING)
