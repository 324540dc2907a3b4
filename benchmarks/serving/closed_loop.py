"""Closed loops: so many clients, each sending its next request when its last one ended.

Prompts are random token ids, outputs have a fixed length. The time per output token of a request is the time from its
first to its last token over the tokens in between.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128


def load_at(url: str, model: str, vocabulary: int, requests: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Load a server at every number of clients, each after a round of requests that is not counted.

    A batch of a size that the server has not met makes it compile kernels: seconds, in the first round only.

    Args:
        url: of the server, without /v1.
        model: the name it serves.
        vocabulary: its tokens are drawn from it.
        requests: number of clients -> requests of each.

    Returns:
        Per number of clients: requests, tpot_ms (times per output token of all requests, sorted), tpot_ms_median, and
        output_tokens_per_s of all clients together.
    """
    loads = {}
    for clients, each in requests.items():
        _load(url, model, vocabulary, clients=clients, requests=1)
        loads[clients] = _load(url, model, vocabulary, clients=clients, requests=each)
    return loads


def _load(url: str, model: str, vocabulary: int, *, clients: int, requests: int) -> dict[str, Any]:
    times: list[float] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(requests):
            prompt = [generator.randrange(100, vocabulary - 100) for _ in range(PROMPT_TOKENS)]
            per_token = _stream_one(url, model, prompt)
            with lock:
                times.append(per_token)

    threads = [threading.Thread(target=client, args=(clients * 1000 + index,)) for index in range(clients)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - started
    assert len(times) == clients * requests, f"{clients * requests - len(times)} requests failed"
    return {
        "requests": len(times),
        "tpot_ms_median": statistics.median(times),
        "tpot_ms": [round(each, 4) for each in sorted(times)],
        "output_tokens_per_s": len(times) * OUTPUT_TOKENS / wall,
    }


def _stream_one(url: str, model: str, prompt: list[int]) -> float:
    """Return the milliseconds per output token of one streamed completion."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    first = last = 0.0
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                last = time.monotonic()
                first = first or last
    return 1000 * (last - first) / (OUTPUT_TOKENS - 1)


def table_of(sides: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Return a line per side: time per output token and tokens per second at every number of clients."""
    counts = list(next(iter(sides.values())))
    lines = [
        " " * 15 + "".join(f"{f'{clients} clients':>21}" for clients in counts),
        f"{'side':<15}" + f"{'TPOT ms':>10} {'tokens/s':>10}" * len(counts),
    ]
    for side, loads in sides.items():
        cells = (f"{loads[at]['tpot_ms_median']:10.3f} {loads[at]['output_tokens_per_s']:10.1f}" for at in counts)
        lines.append(f"{side:<15}" + "".join(cells))
    return "\n".join(lines)
