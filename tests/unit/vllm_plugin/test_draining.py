"""New requests are refused while the server is stopped, those before are finished."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.vllm_plugin.draining import RefuseWhileDraining


def answer(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch, query: bytes = b"") -> list[dict[str, Any]]:
    """Return what a client gets; the server itself answers everything with 200."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        raise AssertionError("no body is read")

    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", str(folder / "plan.json"))
    scope = {"type": "http", "path": path, "query_string": query}
    asyncio.run(RefuseWhileDraining(server)(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_new_requests_are_refused_once_the_folder_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert answer(tmp_path, path, monkeypatch)[0]["status"] == 200
    RunFolder(tmp_path).set_draining()
    start, body = answer(tmp_path, path, monkeypatch)
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"].isdigit()
    assert b"stopping" in body["body"]


def test_metrics_are_answered_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(tmp_path).set_draining()
    assert answer(tmp_path, "/metrics", monkeypatch)[0]["status"] == 200


@pytest.mark.parametrize("several_servers", [False, True])
def test_the_launcher_gets_the_metrics_that_it_names_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several_servers: bool
) -> None:
    if several_servers:  # vLLM makes their page from files
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    _, *body = answer(tmp_path, "/metrics", monkeypatch, query=b"heartbeat&name[]=python_info&name[]=more")
    lines = [line for part in body for line in part["body"].decode().splitlines() if not line.startswith("#")]
    assert [line.partition("{")[0] for line in lines] == ([] if several_servers else ["python_info"])


def test_the_launchers_own_questions_are_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tmp_path, "/health", monkeypatch)
    (refused, logged) = (
        logging.getLogger("uvicorn.access").filter(
            logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "%s %s", ("GET", path), None)
        )
        for path in ("/metrics?heartbeat&name[]=x", "/metrics")
    )
    assert (bool(refused), bool(logged)) == (False, True)


def test_from_when_it_serves_garbage_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    try:
        answer(tmp_path, "/health", monkeypatch)
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
