"""Prefill and decode on real vLLM servers, one and two, behind the real router: started once, asked, then broken.

The death of every other part: with stand-ins, in tests/unit/launcher/test_launch_group.py.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import itertools
import json
import os
import random
import signal
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import ExitCode, ServerFailedError
from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.kv_transfer import received_tokens
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.verdict import kernels_in_use
from tests.builders import profile_with
from tests.free_ports import free_ports
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, Served, ask, plan_here

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router")
BLOCK = 128
"""Tokens of a cache block of vLLM's CPU build: only whole ones are handed over."""
# Less than a block, its edges, a prompt that is looked up by fewer blocks than it fills, and several blocks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 3 * BLOCK + 1, 480)
PREFILL, DECODE = 1, 2
ROUNDS = 2
REQUESTS = ROUNDS * PREFILL * DECODE
"""Requests in turns, after which every server has had as many as the others of its kind."""
HANDED_OVER = {1: 0, 127: 0, 128: 0, 129: 0, 130: 128, 256: 128, 257: 0, 258: 256, 385: 0, 480: 384}


@dataclass
class Seen:
    """What the servers answered while they ran, and how the run ended."""

    run_dir: Path
    info: ServerInfo | None = None
    short: tuple[Answer, ...] = ()
    in_turns: tuple[list[int], ...] = ()
    """Answers to one prompt, one request after the other."""
    at_once: tuple[list[int], ...] = ()
    """Answers to another one, all requests at the same time."""
    alone: tuple[list[int], ...] = ()
    """Those of one server to both."""
    taken: tuple[int, ...] = ()
    """Prompt tokens that each server took for the requests in turns."""
    through_router: dict[int, list[int]] = field(default_factory=dict)
    from_one_server: dict[int, list[int]] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    chat: str = ""
    cut_off: str = ""
    error: ServerFailedError | None = None


def complete(url: str, prompt: list[int]) -> list[int]:
    """Return 16 greedy tokens."""
    body = {
        "model": ServerClient(url).models()[0],
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    choice = post(f"{url}/v1/completions", body)["choices"][0]
    return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]


def post(url: str, body: dict[str, Any]) -> Any:
    with open_post(url, body) as response:
        return json.load(response)


def open_post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


def streamed_chat(url: str) -> str:
    messages = [{"role": "user", "content": "def add(a, b):\n    " * 20}]
    model = ServerClient(url).models()[0]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    with open_post(f"{url}/v1/chat/completions", body) as response:
        lines = [line.decode().removeprefix("data: ").strip() for line in response if line.strip()]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])


def plan_of_many() -> Plan:
    """Return a plan of all servers. Where there are fewer cores some share one: the same tokens, only later."""
    hardware = probe_hardware()
    assert hardware.cpu is not None
    cores = max(hardware.cpu.cores, PREFILL + DECODE)
    core_ids = tuple(itertools.islice(itertools.cycle(hardware.cpu.core_ids), cores))
    numbers = {"prefill_servers": PREFILL, "decode_servers": DECODE}
    return plan_here(
        "--logprobs-mode", "raw_logits", "--enforce-eager", port=free_ports(PREFILL + DECODE + 2), dtype="float32",
        profile=profile_with(passes={"disaggregation": numbers}),
        hardware=dataclasses.replace(hardware, cpu=dataclasses.replace(hardware.cpu, cores=cores, core_ids=core_ids)),
        wishes=resolve_wishes(("flash-dmoe",), ()), required=frozenset({"disaggregation", "flash_dmoe"}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve, ask, kill the engine of a decode server in the middle of an answer."""
    cut_off: list[Future[str]] = []
    seen = Seen(tmp_path_factory.mktemp("run") / "group")
    # Each length its own prompt: none is a beginning of another, so none is in a cache by chance.
    prompts = {length: random.Random(length).choices(range(20, 800), k=length) for length in LENGTHS}

    def visit(info: ServerInfo) -> None:
        seen.info = info
        clients = [ServerClient(server.base_url) for server in info.servers]
        one, decode = info.servers[0].base_url, clients[PREFILL:]
        seen.short = ask(info.base_url)
        for length, prompt in prompts.items():
            before = sum(map(received_tokens, decode))
            seen.through_router[length] = complete(info.base_url, prompt)
            seen.received[length] = sum(map(received_tokens, decode)) - before
            seen.from_one_server[length] = complete(one, prompt)
        # One beginning, many lengths: what one of them wrote another finds.
        for length in LENGTHS:
            assert complete(info.base_url, prompts[480][:length]) == complete(one, prompts[480][:length])
        in_turns, at_once = (random.Random(seed).choices(range(20, 800), k=300) for seed in (1000, 1001))
        taken = [prompt_tokens(client) or 0 for client in clients]
        seen.in_turns = tuple(complete(info.base_url, in_turns) for _ in range(REQUESTS))
        seen.taken = tuple((prompt_tokens(client) or 0) - old for client, old in zip(clients, taken, strict=True))
        with ThreadPoolExecutor(REQUESTS) as asking:
            seen.at_once = tuple(asking.map(lambda _: complete(info.base_url, at_once), range(REQUESTS)))
        seen.alone = (complete(one, in_turns), complete(one, at_once))
        seen.chat = streamed_chat(info.base_url)
        (engine,) = [proof.pid for proof in info.servers[-1].proofs if proof.role == "engine"]
        writing = threading.Event()
        cut_off.append(pool.submit(read_until_cut_off, info.base_url, writing))
        assert writing.wait(300)
        os.kill(engine, signal.SIGKILL)

    plan = plan_of_many()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ServerFailedError) as caught:
            serve(plan, run_dir=seen.run_dir, ready_timeout_s=READY_TIMEOUT_S, on_ready=visit)
        seen.cut_off = cut_off[0].result(timeout=300)
    seen.error = caught.value
    return seen


def test_the_cache_travelled_before_the_servers_counted_as_ready(seen: Seen) -> None:
    assert seen.info is not None
    (row,) = [row for row in seen.info.rows if row.pass_name == "disaggregation"]
    assert (row.applied, row.why_not) == ("by servers", "")
    # A prompt of more than a block for each turn, until every server has had one.
    assert row.ran.startswith(f"yes, {max(PREFILL, DECODE) * BLOCK} tokens received by {DECODE} ")


def test_every_server_runs_our_kernel(seen: Seen) -> None:
    assert seen.info is not None
    assert [bool(kernels_in_use(server.proofs)) for server in seen.info.servers] == [True] * (PREFILL + DECODE)


def test_servers_of_a_kind_take_as_many_requests(seen: Seen) -> None:
    # Each request's prompt is taken once for reading and once for writing.
    assert [tokens // 300 for tokens in seen.taken] == [ROUNDS * DECODE] * PREFILL + [ROUNDS * PREFILL] * DECODE


def test_whichever_servers_a_prompt_meets_its_tokens_are_those_of_one_server(seen: Seen) -> None:
    assert seen.in_turns == (seen.alone[0],) * REQUESTS


def test_a_prompt_that_all_servers_get_at_once_has_the_tokens_of_one_server(seen: Seen) -> None:
    assert seen.at_once == (seen.alone[1],) * REQUESTS


def test_short_prompts_get_the_tokens_of_stock_vllm(seen: Seen, stock_fp32: Served) -> None:
    assert [answer.tokens for answer in seen.short] == [answer.tokens for answer in stock_fp32.answers]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_gets_the_tokens_of_one_server_and_hands_over_whole_blocks(seen: Seen, length: int) -> None:
    assert seen.through_router[length] == seen.from_one_server[length]
    assert seen.received[length] == HANDED_OVER[length]


def test_a_chat_is_streamed_through_the_router(seen: Seen) -> None:
    assert seen.chat


def test_the_death_of_a_decode_server_in_the_middle_of_an_answer_ends_everything_and_names_it(seen: Seen) -> None:
    assert seen.error is not None
    assert str(seen.error).startswith(f"decode-{DECODE - 1} server ")
    assert seen.error.exit_code is ExitCode.SERVER_FAILED
    # The client is told, one way or another, and does not wait for ever.
    assert seen.cut_off
    assert processes_of(seen.run_dir) == []
    assert not (seen.run_dir / "kv").exists()


def read_until_cut_off(url: str, writing: threading.Event) -> str:
    """Have long answers streamed one after the other, and return how the last one ended: by an error in the stream or
    by the connection's end. One that ends as if it were whole has all its tokens: a busy machine may have made them,
    and hand them on, before the part that was killed was missed.
    """
    body = {
        "model": ServerClient(url).models()[0],
        "prompt": [9] * 8, "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    while True:
        lines: list[str] = []
        try:
            with open_post(f"{url}/v1/completions", body) as response:
                for line in filter(bytes.strip, response):
                    writing.set()
                    lines.append(line.decode().removeprefix("data: ").strip())
        except (OSError, http.client.HTTPException) as error:
            return f"broken: {error}"
        if any('"error"' in line for line in lines):
            return f"told: {lines}"
        if lines[-1:] != ["[DONE]"]:
            return f"closed after {lines}"
        assert json.loads(lines[-2])["usage"]["completion_tokens"] == 480, "a part ended as if it were whole"
