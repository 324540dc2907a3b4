"""A stand-in for vLLM's API: a "model" of ten tokens whose next-token distribution depends on the last one alone."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 10
Row = list[float]
"""Log-probabilities of all tokens."""


def right(last: int, batch: int) -> Row:
    """Every token is likely to be followed by the next."""
    weights = [9.0 if token == (last + 1) % VOCABULARY else 1.0 + 0.1 * token for token in range(VOCABULARY)]
    return [math.log(each / sum(weights)) for each in weights]


class PaperServer:
    """What a server was asked, and how it answers."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.row: Callable[[int, int], Row] = right
        """Last token and number of prompts in the request -> distribution."""
        self.continued: Callable[[list[str]], list[str]] = lambda prompts: [f"{each} and on" for each in prompts]
        """Prompts of a request that are text -> what follows."""
        self.asked = 0
        self.stop: Callable[[], None] = lambda: None

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        prompts = body["prompt"]
        if isinstance(prompts[0], str):
            return {"choices": [{"index": n, "text": text} for n, text in enumerate(self.continued(prompts))]}
        return {"choices": [self._choice(n, prompt, body, len(prompts)) for n, prompt in enumerate(prompts)]}

    def _choice(self, number: int, prompt: list[int], body: dict[str, Any], batch: int) -> dict[str, Any]:
        if "prompt_logprobs" in body:
            rows = [self.row(token, batch) for token in prompt[:-1]]
            told = [{str(t): {"logprob": value} for t, value in enumerate(row)} for row in rows]
            return {"index": number, "prompt_logprobs": [None, *told]}
        tokens, values, tops, last = [], [], [], prompt[-1]
        for _ in range(body["max_tokens"]):
            row = self.row(last, batch)
            last = max(range(VOCABULARY), key=lambda token, row=row: row[token])
            tokens.append(f"token_id:{last}")
            values.append(row[last])
            tops.append({f"token_id:{token}": value for token, value in enumerate(row)})
        return {"index": number, "logprobs": {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}}


@contextlib.contextmanager
def paper_server() -> Iterator[PaperServer]:
    """Serve on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "paper", "max_model_len": 128}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self._send({"tokens": [ord(char) % VOCABULARY for char in body["prompt"]]})
                return
            try:
                # As vLLM's: what is no number has no JSON.
                self._send(server.completions(body))
            except ValueError:
                message = "Out of range float values are not JSON compliant"
                self._send({"error": {"message": message}}, status=400)

        def _send(self, found: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(found, allow_nan=False).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = PaperServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()

    def stop() -> None:
        http.shutdown()
        http.server_close()
        thread.join()

    server.stop = stop
    try:
        yield server
    finally:
        stop()
