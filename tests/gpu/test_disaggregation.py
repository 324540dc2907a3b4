"""Prefill and decode on GPUs of their own, the cache between them by NIXL: started once, asked everything, then broken.

Eager, because what is shown is where a prompt's cache goes.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.kv_transfer import received_tokens
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.plan import Plan
from tests.free_ports import free_ports
from tests.gpu.plans import gpu_plan
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import PROMPTS, READY_TIMEOUT_S, Answer, ask
from tests.vllm.test_disaggregation import streamed_chat

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus_and_nixl")]

PASS = "disaggregation"
GPUS = min(3, torch.cuda.device_count())
"""One for prefill, one for each decode server."""
BLOCK = 16
# Less than a block of the cache, its edges, several blocks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100, 480)
ROUNDING = 4
"""BF16 spacings: one server computes the last token of a prompt with the others, the decode server by itself."""


@dataclass
class Seen:
    """What the servers answered while they ran, and how the run ended."""

    run_dir: Path
    info: ServerInfo | None = None
    through_router: dict[int, Answer] = field(default_factory=dict)
    from_one_server: dict[int, Answer] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    apart: Sequence[Answer] = ()
    """To the prompts of all tests, a request for each, through the router."""
    together: Sequence[Answer] = ()
    """To the same in one request."""
    stock: Sequence[Answer] = ()
    """By one server."""
    chat: str = ""
    error: ServerFailedError | None = None


def make() -> Plan:
    """Return the plan of the bundled model on one GPU for prefill and the others for decode."""
    return gpu_plan(
        # What a server has computed before it must not find again: nothing would travel.
        "--logprobs-mode", "raw_logits", "--enforce-eager", "--no-enable-prefix-caching",
        wishes=resolve_wishes((PASS,), ()),
        required=frozenset({PASS}),
        port=free_ports(GPUS + 2),
        max_model_len=1024,
        batch_size=16,
        num_gpus=GPUS,
        layout=f"tp1p1d{GPUS - 1}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve, ask, kill the prefill server's engine."""
    seen = Seen(tmp_path_factory.mktemp("run") / "group")
    plan = make()
    prompts = {length: random.Random(length).choices(range(20, 800), k=length) for length in LENGTHS}

    def visit(info: ServerInfo) -> None:
        seen.info = info
        prefill, *others = info.servers
        decode = [ServerClient(server.base_url) for server in others]
        for length, prompt in prompts.items():
            before = sum(map(received_tokens, decode))
            (seen.through_router[length],) = ask(info.base_url, [prompt])
            seen.received[length] = sum(map(received_tokens, decode)) - before
            (seen.from_one_server[length],) = ask(prefill.base_url, [prompt])
        seen.chat = streamed_chat(info.base_url)
        seen.stock = ask(prefill.base_url)
        seen.apart = [answer for prompt in PROMPTS for answer in ask(info.base_url, [prompt])]
        seen.together = ask(info.base_url)
        (engine,) = [proof.pid for proof in prefill.proofs if proof.role == "engine"]
        os.kill(engine, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        with pytest.raises(ServerFailedError) as caught:
            serve(plan, run_dir=seen.run_dir, ready_timeout_s=READY_TIMEOUT_S, on_ready=visit)
    seen.error = caught.value
    return seen


def test_the_cache_travelled_before_the_servers_counted_as_ready(seen: Seen) -> None:
    assert seen.info is not None
    (row,) = [row for row in seen.info.rows if row.pass_name == PASS]
    assert (row.applied, row.why_not) == ("by servers", "")
    assert row.ran.startswith("yes, ")
    assert f"by {GPUS - 1} decode server" in row.ran


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_gets_the_tokens_of_one_server_and_all_of_it_travels(seen: Seen, length: int) -> None:
    assert seen.received[length] == length
    assert_same_up_to_a_tie(seen.from_one_server[length], seen.through_router[length], spacings=ROUNDING)


def test_prompts_of_requests_of_their_own_get_the_tokens_of_one_server(seen: Seen) -> None:
    for one, ours in zip(seen.stock, seen.apart, strict=True):
        assert_same_up_to_a_tie(one, ours, spacings=ROUNDING)


def test_several_prompts_in_one_request_get_the_tokens_of_one_server(seen: Seen) -> None:
    for one, ours in zip(seen.stock, seen.together, strict=True):
        assert_same_up_to_a_tie(one, ours, spacings=ROUNDING)


def test_a_chat_is_streamed_through_the_router(seen: Seen) -> None:
    assert seen.chat


def test_the_death_of_the_prefill_server_ends_everything_and_names_it(seen: Seen) -> None:
    assert seen.error is not None
    assert str(seen.error).startswith(("prefill-0 server ended", "prefill-0 server hangs"))
    assert seen.error.exit_code == 7
    assert processes_of(seen.run_dir) == []
