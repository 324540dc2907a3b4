"""The OpenAI API: what clients rely on, and what they do wrong."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from moe_optimizer.engine import LLM, AsyncLLM, SamplingParams
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.server.app import create_app
from tests.engine.tiny_models import TINY_MOE
from tests.eventually import eventually
from tests.free_ports import free_port

PROMPT = "def add(a, b):\n"
USAGE = {"include_usage": True}
JSON = {"content-type": "application/json"}
TIMEOUT_S = 60
"""httpx's own are 5 s, which a busy machine may take."""


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(EngineArgs(model=str(TINY_MOE), dtype="float32", max_num_seqs=16))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(llm, "tiny"), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT_S)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=TIMEOUT_S)


def events(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = [line for line in post(url, path, stream=True, **body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def families(url: str) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    return list(text_string_to_metric_families(get(f"{url}/metrics").text))


def test_a_completion_is_what_the_engine_generates(url: str, tiny_moe_llm: LLM) -> None:
    reply = post(url, "completions", prompt=PROMPT, temperature=0, max_tokens=12).json()
    want = tiny_moe_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    assert reply["choices"][0]["text"] == want.outputs[0].text
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(want.prompt_token_ids)
    assert reply["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stop", [None, ["return"]])
def test_a_streamed_completion_is_the_whole_one_in_pieces(url: str, stop: list[str] | None) -> None:
    body = {"prompt": [PROMPT, "import os\n"], "n": 2, "seed": 3, "max_tokens": 20, "logprobs": 1, "stop": stop}
    whole = post(url, "completions", **body).json()
    texts, reasons, usage = {}, {}, None
    for event in events(url, "completions", **body, stream_options=USAGE):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        usage = event.get("usage")
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_an_echo_repeats_the_prompt(url: str) -> None:
    text = post(url, "completions", prompt=PROMPT, echo=True, max_tokens=2, temperature=0).json()["choices"][0]["text"]
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)


def test_a_conversation_is_answered_through_the_template(url: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "What does os.path.join do?"}]}
    body = {"messages": [message], "temperature": 0, "max_completion_tokens": 10}
    reply = post(url, "chat/completions", **body, logprobs=True, top_logprobs=2).json()
    assert reply["choices"][0]["message"]["role"] == "assistant"
    content = reply["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * 10
    content = post(url, "chat/completions", **body, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[]] * 10
    streamed = events(url, "chat/completions", **body)
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed)
    assert text == reply["choices"][0]["message"]["content"]


def test_the_model_is_listed_and_the_server_healthy(url: str) -> None:
    assert get(f"{url}/health").status_code == 200
    assert [each["id"] for each in get(f"{url}/v1/models").json()["data"]] == ["tiny"]
    metrics = get(f"{url}/metrics").text
    assert "moe_optimizer:num_requests_running 0" in metrics
    assert "moe_optimizer:generation_tokens_total" in metrics


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", {}, 400),
        ("completions", {"prompt": ""}, 400),
        ("completions", {"prompt": []}, 400),
        ("completions", {"prompt": [99999]}, 400),
        ("completions", {"prompt": {"a": 1}}, 400),
        ("completions", {"prompt": "x", "temperature": -1}, 400),
        ("completions", {"prompt": "x", "temperature": "hot"}, 400),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400),
        ("completions", {"prompt": "x", "n": 1000}, 400),
        ("completions", {"prompt": "x", "logprobs": 10**6}, 400),
        ("completions", {"prompt": "x", "best_of": 3, "stream": True}, 400),
        ("completions", {"prompt": "x", "temprature": 1}, 400),
        ("completions", {"prompt": "x", "top_k": 2**63}, 400),
        ("completions", {"prompt": "x", "stop": [""]}, 400),
        ("completions", {"prompt": "x", "output_kind": "delta"}, 400),
        ("completions", {"prompt": "x", "min_tokens": 2, "stop_token_ids": [999999]}, 400),
        ("completions", {"prompt": "x " * 5000}, 400),
        ("completions", {"prompt": ["ok", "x " * 5000], "stream": True}, 400),
        ("completions", {"prompt": "x", "model": "another"}, 404),
        ("chat/completions", {"messages": []}, 400),
        ("chat/completions", {"messages": [{"content": "no role"}]}, 400),
        ("chat/completions", {"messages": "hello"}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "x"}}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream_options": USAGE}, 400),
        ("completions", {"prompt": "x", "stream_options": USAGE}, 400),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400),
        ("completions", {"prompt": "x", "self": 1}, 400),
        ("completions", {"prompt": ["x"] * 5000}, 400),
        ("completions", {"prompt": "x", "max_tokens": "5"}, 400),
        ("completions", {"prompt": "x", "logprobs": True}, 400),
        ("completions", {"prompt": [True]}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": 1}, 400),
        ("nothing", {}, 404),
    ],
    ids=lambda each: str(each)[:60],
)
def test_bad_input_is_the_clients_mistake(url: str, path: str, body: dict[str, Any], status: int) -> None:
    reply = post(url, path, **body)
    assert reply.status_code == status, reply.text
    if path != "nothing":
        assert reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_that_is_far_too_long_is_refused_without_being_cut_into_tokens(
    url: str, llm: AsyncLLM, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * 1_000_000
    monkeypatch.setattr(llm.engine.tokenizer, "encode", None)
    reply = post(url, path, **({"prompt": text} if path == "completions" else {"messages": [user(text)]}))
    assert reply.status_code == 400
    assert "max_model_len" in reply.json()["error"]["message"]


def test_a_text_that_takes_long_to_be_cut_into_tokens_holds_up_nobody_else(
    url: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = llm.engine.tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(llm.engine.tokenizer, "encode", slow)
    replies: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: replies.append(post(url, "completions", prompt="x", max_tokens=1)))
    asking.start()
    assert begun.wait(60)
    assert get(f"{url}/health").status_code == 200
    go_on.set()
    asking.join()
    assert replies[0].status_code == 200


def test_a_refused_prompt_is_counted_once_and_not_as_an_abort(url: str) -> None:
    def counts() -> list[float]:
        names = ("request_failed_total", "request_aborted_total", "request_success_total")
        values = {family.name: family.samples[0].value for family in families(url)}
        return [values[f"moe_optimizer:{name.removesuffix('_total')}"] for name in names]

    before = counts()
    assert post(url, "completions", prompt=[[1], [99999]]).status_code == 400
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 0, 0]


def test_metrics_are_read_by_prometheus_and_what_only_grows_is_a_counter(url: str) -> None:
    for family in families(url):
        totals = [sample.name for sample in family.samples if sample.name.endswith("_total")]
        assert family.type == "counter" or not totals, totals


@pytest.mark.parametrize("stream", [True, False])
def test_one_bad_prompt_ends_those_beside_it(url: str, llm: AsyncLLM, stream: bool) -> None:
    reply = post(url, "completions", prompt=["x", "x " * 5000], max_tokens=1500, ignore_eos=True, stream=stream)
    assert reply.status_code == 400
    generated = "moe_optimizer:request_success_total"
    before = get(f"{url}/metrics").text
    eventually(lambda: not llm.engine.groups)
    after = get(f"{url}/metrics").text
    line = next(line for line in before.split("\n") if line.startswith(generated))
    assert line in after, "the first prompt was computed to its end"


def test_a_request_that_finds_no_place_is_told_to_come_again() -> None:
    llm = AsyncLLM(EngineArgs(model=str(TINY_MOE), dtype="float32", max_num_seqs=1, max_waiting_requests=1))

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(app=create_app(llm, "tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=TIMEOUT_S) as client:
            body = {"prompt": PROMPT, "max_tokens": 64, "ignore_eos": True}
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
        return sorted(reply.status_code for reply in replies)

    try:
        assert set(asyncio.run(statuses())) == {200, 503}
    finally:
        llm.shutdown()


CHAT = '"messages": [{"role": "user", "content": "x"}]'


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", "{not json", "JSON"),
        ("completions", "[]", "object"),
        ("completions", "", "body"),
        ("completions", r'{"prompt": "x\ud800"}', "prompt"),
        ("completions", r'{"prompt": ["x", "x\ud800"]}', "prompt"),
        ("chat/completions", r'{"messages": [{"role": "user", "content": "x\ud800"}]}', "surrogate"),
        ("completions", '{"prompt": [-1], "echo": true}', "token -1"),
        ("completions", '{"prompt": [99999999999999999999], "echo": true}', "token 9999"),
        ("completions", '{"prompt": "x", "stop": 5}', "stop"),
        ("completions", '{"prompt": "x", "stop": {"a": 1}}', "stop"),
        ("completions", '{"prompt": "x", "temperature_schedule": 5}', "temperature_schedule"),
        ("chat/completions", f'{{{CHAT}, "chat_template_kwargs": {{"messages": 1}}}}', "messages"),
        (
            "chat/completions",
            f'{{{CHAT}, "chat_template_kwargs": {{"chat_template": "{{{{ 1/0 }}}}"}}}}',
            "chat_template",
        ),
        ("chat/completions", f'{{{CHAT}, "chat_template_kwargs": {{"return_tensors": "pt"}}}}', "return_tensors"),
        ("chat/completions", f'{{{CHAT}, "chat_template_kwargs": {{"tokenizer": 1}}}}', "tokenizer"),
    ],
)
def test_a_body_that_cannot_be_read_as_it_is_is_the_clients_mistake(url: str, path: str, body: str, said: str) -> None:
    reply = httpx.post(f"{url}/v1/{path}", content=body, headers=JSON, timeout=TIMEOUT_S)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert said in message
    assert not message.startswith((":", "0:"))


def test_a_body_without_its_content_type_is_told_what_is_missing(url: str) -> None:
    reply = httpx.post(f"{url}/v1/completions", content='{"prompt": "x"}', timeout=TIMEOUT_S)
    assert reply.status_code == 400
    assert "content-type: application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "name"),
    [({"prompt": 5}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({"prompt": "x", "stream_options": {"y": 1}}, "y")],
    ids=str,
)
def test_a_message_names_the_field_and_not_the_class_that_reads_it(url: str, body: dict[str, Any], name: str) -> None:
    message = post(url, "completions", **body).json()["error"]["message"]
    assert name in message.partition(":")[0]
    assert "[" not in message.partition(":")[0]
    assert {"got", "expected"} <= {*message.replace(",", " ").split()}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404)])
def test_a_route_that_is_not_there_is_an_error_as_clients_read_it(
    url: str, method: str, path: str, status: int
) -> None:
    reply = httpx.request(method, url + path, timeout=TIMEOUT_S)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == status


def test_what_a_client_leaves_open_may_be_null(url: str) -> None:
    open_ = dict.fromkeys(("stream", "stream_options", "n", "echo", "logprobs", "stop", "priority", "user", "seed"))
    reply = post(url, "completions", prompt=PROMPT, max_tokens=2, **open_)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_places_of_tokens_count_the_text_before_them(url: str, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    replies = events(url, "completions", **body) if stream else [post(url, "completions", **body).json()]
    text = "".join(reply["choices"][0]["text"] for reply in replies)
    found = [
        pair
        for reply in replies
        for pair in zip(*(reply["choices"][0]["logprobs"][name] for name in ("text_offset", "tokens")), strict=True)
    ]
    assert len(found) == 6
    for place, token in found:
        assert text[place : place + len(token)] == token


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(url: str, llm: AsyncLLM, stream: bool) -> None:
    async def leave() -> None:
        body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": stream, "n": 4}
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            request = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body))
            while not llm.engine.scheduler.running:
                await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: not llm.engine.groups)
    eventually(lambda: llm.engine.scheduler.blocks.num_available == llm.engine.scheduler.blocks.num_blocks)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_while_it_waits_is_never_computed(url: str, llm: AsyncLLM, stream: bool) -> None:
    scheduler = llm.engine.scheduler
    # Every seat, for longer than the test takes.
    others = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "n": 16}

    async def leave() -> bool:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            first = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=others))
            while len(scheduler.running) < 16:
                await asyncio.sleep(0.01)
            body = {"prompt": PROMPT, "max_tokens": 5, "stream": stream}
            second = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body))
            while not scheduler.waiting:
                await asyncio.sleep(0.01)
            second.cancel()
            while scheduler.waiting and not first.done():
                await asyncio.sleep(0.01)
            left_in_time = not first.done()
            first.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
        return left_in_time

    assert asyncio.run(leave())
    eventually(lambda: not llm.engine.groups)


@pytest.mark.timeout(0)
def test_a_thousand_streams_over_http_with_random_departures_lose_nothing(
    url: str, llm: AsyncLLM, tiny_moe_llm: LLM, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--soak", default=False):
        pytest.skip("takes minutes: run `pytest tests/engine --soak`")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    rng = random.Random(0)
    prompts = [f"def f{number}(a, b):\n" for number in range(50)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    wanted = [each.outputs[0].text for each in tiny_moe_llm.generate(prompts, greedy, use_tqdm=False)]
    body = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "stream": True}

    async def client(http: httpx.AsyncClient, number: int, leaves_after: int | None) -> bool:
        text, want = "", wanted[number % len(prompts)]
        asked = {**body, "prompt": prompts[number % len(prompts)]}
        async with http.stream("POST", f"{url}/v1/completions", json=asked) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    leaves_after = leaves_after and leaves_after - 1
                if leaves_after == 0:
                    return want.startswith(text)
        return text == want

    async def everybody() -> list[bool]:
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:
            leaving = [rng.randint(1, 12) if rng.random() < 0.4 else None for _ in range(1000)]
            return await asyncio.gather(*(client(http, number, after) for number, after in enumerate(leaving)))

    try:
        results = asyncio.run(everybody())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(results)
    eventually(lambda: not llm.engine.groups)
    eventually(lambda: llm.engine.scheduler.blocks.num_available == llm.engine.scheduler.blocks.num_blocks)
    llm.engine.check_integrity()


def test_the_official_client_is_served(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    completion = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0)
    messages = [{"role": "user", "content": "What?"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
    chunks = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0, stream=True)
    assert completion.usage.completion_tokens == 5
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
