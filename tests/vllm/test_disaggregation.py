"""Prefill and decode on two real vLLM servers behind the real router: started once, asked everything, then broken.

The death of every other part: with stand-ins, in tests/unit/launcher/test_launch_group.py.
"""

from __future__ import annotations

import http.client
import importlib.util
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
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.kv_transfer import received_tokens
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.proof.verdict import kernels_in_use
from tests.free_ports import four_free_ports
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, Served, ask, tiny_plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router")
BLOCK = 128
"""Tokens of a cache block of vLLM's CPU build: only whole ones are handed over."""
# Less than a block, its edges, a prompt that is looked up by fewer blocks than it fills, and several blocks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 3 * BLOCK + 1, 480)
HANDED_OVER = {1: 0, 127: 0, 128: 0, 129: 0, 130: 128, 256: 128, 257: 0, 258: 256, 385: 0, 480: 384}


@dataclass
class Seen:
    """What the servers answered while they ran, and how the run ended."""

    run_dir: Path
    info: ServerInfo | None = None
    short: tuple[Answer, ...] = ()
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


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve, ask, kill the decode server's engine in the middle of an answer."""
    cut_off: list[Future[str]] = []
    seen = Seen(tmp_path_factory.mktemp("run") / "group")
    # Each length its own prompt: none is a beginning of another, so none is in a cache by chance.
    prompts = {length: random.Random(length).choices(range(20, 800), k=length) for length in LENGTHS}

    def visit(info: ServerInfo) -> None:
        seen.info = info
        prefill, decode = info.servers
        seen.short = ask(info.base_url)
        for length, prompt in prompts.items():
            before = received_tokens(ServerClient(decode.base_url))
            seen.through_router[length] = complete(info.base_url, prompt)
            seen.received[length] = received_tokens(ServerClient(decode.base_url)) - before
            seen.from_one_server[length] = complete(prefill.base_url, prompt)
        # One beginning, many lengths: what one of them wrote another finds.
        for length in LENGTHS:
            assert complete(info.base_url, prompts[480][:length]) == complete(prefill.base_url, prompts[480][:length])
        seen.chat = streamed_chat(info.base_url)
        (engine,) = [proof.pid for proof in decode.proofs if proof.role == "engine"]
        writing = threading.Event()
        cut_off.append(pool.submit(read_until_cut_off, info.base_url, writing))
        assert writing.wait(300)
        os.kill(engine, signal.SIGKILL)

    plan = tiny_plan("--enforce-eager", "--port", str(four_free_ports()), required=("disaggregation", "flash_dmoe"))
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
    assert row.ran.startswith(f"yes, {BLOCK} tokens")


def test_both_servers_run_our_kernel(seen: Seen) -> None:
    assert seen.info is not None
    assert [bool(kernels_in_use(server.proofs)) for server in seen.info.servers] == [True, True]


def test_short_prompts_get_the_tokens_of_stock_vllm(seen: Seen, stock_fp32: Served) -> None:
    assert [answer.tokens for answer in seen.short] == [answer.tokens for answer in stock_fp32.answers]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_gets_the_tokens_of_one_server_and_hands_over_whole_blocks(seen: Seen, length: int) -> None:
    assert seen.through_router[length] == seen.from_one_server[length]
    assert seen.received[length] == HANDED_OVER[length]


def test_a_chat_is_streamed_through_the_router(seen: Seen) -> None:
    assert seen.chat


def test_the_death_of_the_decode_server_in_the_middle_of_an_answer_ends_everything_and_names_it(seen: Seen) -> None:
    assert seen.error is not None
    assert str(seen.error).startswith("decode server ")
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
