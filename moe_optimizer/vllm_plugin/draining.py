"""An ASGI middleware of the API server: what the launcher and the server have to say to each other by HTTP.

Heartbeats are answered here, with the metrics that they name. New requests are refused while the launcher stops the
server: vLLM itself answers them with 500, and /health with 200, until the requests before them are finished.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from moe_optimizer import env
from moe_optimizer.proof.record import DRAINING_FILE, HEARTBEAT_QUERY
from moe_optimizer.vllm_plugin.unfinished import show_unfinished

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_RETRY_AFTER_S = 10
"""Chosen: a proxy sends it elsewhere at once, and a new start takes longer."""
_MESSAGE = "the server is stopping and takes no new requests"
_STILL_ANSWERED = ("/metrics", "/version")


class RefuseWhileDraining:
    """Answers 503 with Retry-After once the launcher has marked the run folder; requests before that go on."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        # Its imports are over (see `supervised`). vLLM freezes them now, and would first look through all, for 0.5 s.
        gc.freeze()
        gc.enable()
        self._app = app
        plan = os.environ.get(env.PLAN)
        logging.getLogger("uvicorn.access").addFilter(_is_not_a_heartbeat)
        self._marker = Path(plan).parent / DRAINING_FILE if plan else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        show_unfinished(scope.get("app"))
        if names := _named_metrics(scope):
            page = generate_latest(REGISTRY.restricted_registry(names))
            await _answer(send, 200, page, {b"content-type": CONTENT_TYPE_LATEST.encode()})
            return
        refused = scope["type"] == "http" and not scope["path"].startswith(_STILL_ANSWERED)
        if not refused or self._marker is None or not self._marker.exists():
            await self._app(scope, receive, send)
            return
        error = {"message": _MESSAGE, "type": "ServiceUnavailableError", "param": None, "code": 503}
        headers = {
            b"content-type": b"application/json",
            b"retry-after": str(_RETRY_AFTER_S).encode(),
            b"connection": b"close",
        }
        await _answer(send, 503, json.dumps({"error": error}).encode(), headers)


def _named_metrics(scope: Message) -> list[str]:
    """Return the metrics that a heartbeat names; vLLM would make the whole page of a thousand lines each time.

    None of them if several API servers make the page together.
    """
    asks = scope["type"] == "http" and scope["path"] == "/metrics" and "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    query = scope["query_string"].decode("ascii", errors="replace") if asks else ""
    return parse_qs(query).get("name[]", []) if f"?{query}".startswith(HEARTBEAT_QUERY) else []


async def _answer(send: Send, status: int, body: bytes, headers: dict[bytes, bytes]) -> None:
    listed = [*headers.items(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


def _is_not_a_heartbeat(record: logging.LogRecord) -> bool:
    # uvicorn's arguments: client, method, path, HTTP version, status.
    return HEARTBEAT_QUERY not in str(record.args)
