"""Streams greedy completions of a fixed length from a server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any


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
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield line[6:]
