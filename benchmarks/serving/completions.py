"""Streams greedy completions of a fixed length from a server."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from typing import Any

# Made once: from Python 3.12 on each thread that is the first to call `urlopen` reads the certificates of all
# authorities, 25 ms under the interpreter's lock. Clients that begin at once waited for each other, and the first token
# of 64 of them seemed to take 1.6 s.
_OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
)


def streamed(base_url: str, model: str, prompt: list[int], tokens: int, **body: Any) -> Iterator[bytes]:
    """Yield the JSON of each chunk of a completion as it arrives.

    Args:
        base_url: of the server, without /v1.
        model: the name it serves.
        prompt: token ids.
        tokens: length of the answer.
        body: further fields of the request.
    """
    body |= {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with _OPENER.open(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield line[6:]
