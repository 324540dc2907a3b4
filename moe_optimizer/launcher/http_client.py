"""Sends the HTTP requests that the launcher makes of its own server."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any

from moe_optimizer.proof.record import HEARTBEAT_QUERY

_HEALTH_TIMEOUT_S = 5.0
"""Chosen: a server that answers later is asked again."""
_HEARTBEAT_TIMEOUT_S = 2.0
"""Chosen: it is asked once a second."""
_TIMEOUT_S = 30.0
"""Chosen: these answers take milliseconds, but seconds on a machine that does much else."""


class ServerClient:
    """Sends requests to one server. A proxy in the environment is ignored: the server is on this machine.

    Args:
        base_url: for example "http://127.0.0.1:8000".
        api_key: what the server was started with; None when it asks for none.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # The certificate names the server's public name, not 127.0.0.1: it is not verified, and the authorities of this
        # machine, which take most of the time of making a client, are not read.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def healthy(self, *, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
        """Whether /health answers 200 now, within so many seconds."""
        try:
            with self._opener.open(f"{self.base_url}/health", timeout=timeout_s) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def models(self) -> tuple[str, ...]:
        """Return the names under which the server serves.

        Raises:
            OSError: it does not answer.
        """
        return tuple(model["id"] for model in self._request("/v1/models")["data"])

    def max_model_len(self) -> int:
        """Return the most tokens that a prompt and its completion may have together.

        Raises:
            OSError: it does not answer.
        """
        return int(self._request("/v1/models")["data"][0]["max_model_len"])

    def paused(self) -> bool:
        """Whether vLLM says that generation was paused on purpose; one that does not say so, or not at once, is not."""
        try:
            return bool(self._request("/is_paused?heartbeat", timeout_s=_HEARTBEAT_TIMEOUT_S).get("is_paused"))
        except (OSError, ValueError):
            return False

    def metrics(self, *names: str, timeout_s: float = _TIMEOUT_S) -> str:
        """Return the page of the server's metrics, or of those that are named where it takes names: others cost time.

        Raises:
            OSError: it does not answer.
        """
        query = "".join(f"&name[]={name}" for name in names)
        page = self._read(f"{self.base_url}/metrics{HEARTBEAT_QUERY}{query}", timeout_s)
        return page.decode("utf-8", errors="replace")

    def complete(self, prompt: str | list[int], *, max_tokens: int, timeout_s: float) -> str:
        """Return a greedy completion of a text, or of token ids.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        body = {"model": self.models()[0], "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self._request("/v1/completions", body, timeout_s)["choices"][0]["text"]

    def tokenize(self, text: str, *, timeout_s: float) -> list[int]:
        """Return the tokens of a text, without those that a prompt begins with.

        Raises:
            OSError: the server does not answer, or knows no such request.
        """
        body = {"model": self.models()[0], "prompt": text, "add_special_tokens": False}
        return self._request("/tokenize", body, timeout_s)["tokens"]

    def completions(self, body: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """Return the choices of a completion request, in the order of its prompts.

        Raises:
            OSError: the server does not answer in time, or refuses.
        """
        choices = self._request("/v1/completions", dict(body), timeout_s)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def generate(self, body: Mapping[str, Any], *, timeout_s: float) -> None:
        """Have a completion made, and read it to its end, streamed or not.

        Raises:
            OSError: the server does not answer in time, or refuses.
        """
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}/v1/completions", data=data, headers=self._headers)
        self._read(request, timeout_s)

    def _request(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = _TIMEOUT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}{path}", data=data, headers=self._headers)
        return json.loads(self._read(request, timeout_s))

    def _read(self, request: str | urllib.request.Request, timeout_s: float) -> bytes:
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return response.read()
        except http.client.HTTPException as error:
            # A server that ends in the middle of its answer.
            raise ConnectionError(f"{type(error).__name__}: {error}") from None


def api_key() -> str | None:
    """Return the key that the server asks for, from vLLM's variable."""
    return os.environ.get("VLLM_API_KEY") or None
