"""Closed loops count no round in which the server compiled."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.serving.closed_loop import MOST_SENT, load_at

VOCABULARY = 1000


@contextlib.contextmanager
def streaming_server() -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Answer every completion with two chunks; give the address and the prompts that came."""
    prompts: list[tuple[int, ...]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompts.append(tuple(body["prompt"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"data: {}\n\ndata: {}\n\ndata: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", prompts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_counted_round_in_which_something_compiled_is_thrown_away_and_sent_again_with_other_prompts():
    # Asked before and after each counted round: the first two compile, the third does not.
    counts = iter([0, 2, 2, 3, 3, 3])
    with streaming_server() as (url, prompts):
        load = load_at(url, "m", VOCABULARY, {1: 2}, compiled=lambda: next(counts))[1]
    assert load["thrown_away"] == 2
    assert load["requests"] == 2
    assert len(prompts) == len(load["uncounted_tokens_per_s"]) + 3 * 2
    assert len(set(prompts)) == len(prompts)


def test_rounds_without_a_compilation_are_sent_once():
    with streaming_server() as (url, _):
        load = load_at(url, "m", VOCABULARY, {1: 1}, compiled=lambda: 7)[1]
    assert load["thrown_away"] == 0


def test_a_server_that_never_stops_to_compile_has_no_result():
    with streaming_server() as (url, _), pytest.raises(RuntimeError, match=f"each of {MOST_SENT} rounds"):
        load_at(url, "m", VOCABULARY, {1: 1}, compiled=itertools.count().__next__)
