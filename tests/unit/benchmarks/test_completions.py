"""Clients of a benchmark make nothing anew for a request."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from benchmarks.serving.completions import streamed


@pytest.fixture
def url() -> Iterator[str]:
    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            pass

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_first_request_of_a_client_makes_no_opener(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # From Python 3.12 on it reads the certificates of all authorities, for each client that begins at the same time.
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setattr(urllib.request, "build_opener", lambda *_: pytest.fail("an opener for this request"))
    assert list(streamed(url, "m", [1, 2], 1)) == [b'{"choices": []}\n']


def test_a_proxy_of_the_environment_is_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert list(streamed(url, "m", [1, 2], 1)) == [b'{"choices": []}\n']
