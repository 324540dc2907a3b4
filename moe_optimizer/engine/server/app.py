"""The routes. Bad input gets a 4xx with the error's text; a client that goes away has its request aborted."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from operator import itemgetter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from moe_optimizer.arguments import complaint
from moe_optimizer.engine.async_llm import AsyncLLM, Indexed, QueueFullError
from moe_optimizer.engine.llm import default_sampling_params, several
from moe_optimizer.engine.outputs import RequestOutput
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.engine.server.metrics import Metrics
from moe_optimizer.engine.server.replies import Reply
from moe_optimizer.engine.server.schema import ChatRequest, CompletionRequest
from moe_optimizer.engine.tokenizer import chat_text
from moe_optimizer.errors import InputError, MoeOptimizerError, ServerFailedError

_CLIENT_GONE = 499
"""Nobody reads it: nginx's code for a client that closed the connection, for the access log."""


def create_app(llm: AsyncLLM, model_name: str) -> FastAPI:
    """Return the application that serves `llm` under `model_name`."""
    app = FastAPI(title="moe-optimizer embedded engine", docs_url=None, redoc_url=None)
    defaults = default_sampling_params(llm.engine)
    metrics = Metrics(llm.engine)

    @app.get("/health")
    async def health() -> Response:
        llm.check_health()
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": model_name, "object": "model", "owned_by": "moe-optimizer"}
        return {"object": "list", "data": [{**card, "max_model_len": llm.engine.max_model_len}]}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        params, prompts = body.sampling_params(defaults), several(body.prompt)
        if body.echo and (llm.engine.tokenizer is None or body.logprobs is not None):
            raise InputError("echo: got true without a tokenizer or with logprobs, which a prompt has none of here")
        reply = Reply(model_name, chat=False, n=params.n, decode=llm.engine.tokenizer.decode if body.echo else None)
        return await answer(prompts, params, reply, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        params, messages = body.sampling_params(defaults), [message.plain() for message in body.messages]
        options = {"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs}
        text = chat_text(llm.engine.tokenizer, messages, **options)
        prompt = await asyncio.to_thread(llm.engine.encode, text, add_special_tokens=False)
        reply = Reply(model_name, chat=True, n=params.n, top_logprobs=params.logprobs or 0)
        return await answer([prompt], params, reply, body, request)

    async def answer(
        prompts: Any, params: SamplingParams, reply: Reply, body: CompletionRequest | ChatRequest, request: Request
    ) -> Response:
        if body.model not in (None, model_name):
            raise HTTPException(404, f"model: got {body.model!r}, expected {model_name!r}")
        outputs = metrics.watch(llm.generate_all(prompts, params, priority=body.priority), len(prompts))
        # The first output before the first byte: what is wrong with the request is still a 4xx.
        found = await _unless_client_leaves(request, anext(outputs) if body.stream else _finished(outputs))
        if found is None:
            return Response(status_code=_CLIENT_GONE)
        if not body.stream:
            return JSONResponse(reply.whole(found))
        events = _events(outputs, found, reply, body.stream_options.get("include_usage", False))
        return StreamingResponse(events, media_type="text/event-stream")

    @app.exception_handler(RequestValidationError)
    async def _(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _error(400, f"body: got no JSON: {first['ctx']['error']}")
        # Of a field that takes several types, pydantic names the type too: list[int].
        names = [each for each in map(str, first["loc"][1:]) if "[" not in each]
        return _error(400, complaint(".".join(names) or "body (JSON, content-type: application/json)", first))

    @app.exception_handler(HTTPException)
    async def _(_request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, error.detail)

    @app.exception_handler(MoeOptimizerError)
    async def _(_request: Request, error: MoeOptimizerError) -> Response:
        unavailable = isinstance(error, (QueueFullError, ServerFailedError))
        status = 503 if unavailable else 400 if isinstance(error, ValueError) else 500
        return _error(status, f"{error}" + (f"; hint: {error.hint}" if error.hint else ""))

    return app


def _error(status: int, message: str) -> Response:
    return JSONResponse(_error_body(status, message), status)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _finished(outputs: AsyncGenerator[Indexed]) -> list[RequestOutput]:
    async with aclosing(outputs):
        return [output for _, output in sorted([each async for each in outputs], key=itemgetter(0))]


async def _unless_client_leaves(request: Request, work: Awaitable[Any]) -> Any:
    """Return what comes, or None and cancel it if the client closes the connection before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    coming, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((coming, leaving), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        leaving.cancel()
        coming.cancel()


async def _events(outputs: AsyncGenerator[Indexed], first: Indexed, reply: Reply, usage: bool) -> AsyncGenerator[str]:
    async with aclosing(outputs):
        if chunk := reply.chunk(*first):
            yield _event(chunk)
        try:
            async for output in outputs:
                if chunk := reply.chunk(*output):
                    yield _event(chunk)
        except MoeOptimizerError as error:
            yield _event(_error_body(500, str(error)))
            return
        if usage:
            yield _event(reply.usage_chunk())
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
