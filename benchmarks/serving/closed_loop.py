"""Loads a server with closed loops: a number of clients, each sending its next request when its last one ended.

Prompts are random token ids, outputs have a fixed length. The time per output token of a request is the time from its
first to its last token over the tokens in between.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.serving.completions import streamed

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
SETTLED = 0.05
"""Rounds that are not counted go on until tokens per second rise by less than this share,"""
MOST_UNCOUNTED = 5
"""or there were so many."""
MOST_SENT = 8
"""A counted round in which something compiled is thrown away, and sent again until there were so many."""


def load_at(
    url: str, model: str, vocabulary: int, requests: Mapping[int, int], *, compiled: Callable[[], int]
) -> dict[int, dict[str, Any]]:
    """Load a server at every number of clients, each after rounds of a request per client that are not counted.

    A batch of a size that the server has not met makes it compile kernels, seconds at a time; with FP8 weights it meets
    new ones for several rounds. No prompt comes twice: its prefix would be cached.

    Args:
        url: of the server, without /v1.
        model: the name it serves.
        vocabulary: its tokens are drawn from it.
        requests: number of clients -> requests of each.
        compiled: returns how much the server compiled so far.

    Returns:
        Per number of clients: requests, tpot_ms (times per output token of all requests, sorted), tpot_ms_median,
        ttft_ms_median (time to the first token), output_tokens_per_s of all clients together,
        uncounted_tokens_per_s, those of the rounds before, and thrown_away, counted rounds in which something compiled.

    Raises:
        RuntimeError: something compiled in every counted round.
    """
    loads = {}
    for clients, each in requests.items():
        rates: list[float] = []
        while len(rates) < 2 or (rates[-1] > rates[-2] * (1 + SETTLED) and len(rates) < MOST_UNCOUNTED):
            found = _load(url, model, vocabulary, clients=clients, requests=1, round_number=len(rates))
            rates.append(found["output_tokens_per_s"])
        for thrown_away in range(MOST_SENT):
            before, number = compiled(), len(rates) + thrown_away
            counted = _load(url, model, vocabulary, clients=clients, requests=each, round_number=number)
            if compiled() == before:
                break
        else:
            raise RuntimeError(f"{clients} clients: something compiled in each of {MOST_SENT} rounds")
        uncounted = [round(rate, 1) for rate in rates]
        loads[clients] = {**counted, "uncounted_tokens_per_s": uncounted, "thrown_away": thrown_away}
    return loads


def _load(url: str, model: str, vocabulary: int, *, clients: int, requests: int, round_number: int) -> dict[str, Any]:
    times: list[float] = []
    firsts: list[float] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        generator = random.Random(f"{seed} {round_number}")
        for _ in range(requests):
            prompt = [generator.randrange(100, vocabulary - 100) for _ in range(PROMPT_TOKENS)]
            first, per_token = _stream_one(url, model, prompt)
            with lock:
                firsts.append(first)
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
        "ttft_ms_median": statistics.median(firsts),
        "tpot_ms": [round(each, 4) for each in sorted(times)],
        "output_tokens_per_s": len(times) * OUTPUT_TOKENS / wall,
    }


def _stream_one(url: str, model: str, prompt: list[int]) -> tuple[float, float]:
    """Return the milliseconds to the first token of one streamed completion, and per output token behind it."""
    first = last = 0.0
    started = time.monotonic()
    for _ in streamed(url, model, prompt, OUTPUT_TOKENS):
        last = time.monotonic()
        first = first or last
    return 1000 * (first - started), 1000 * (last - first) / (OUTPUT_TOKENS - 1)


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
