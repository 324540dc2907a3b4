"""Loads a server from the moment that it is ready, and tells how fast it was in each stretch of time since then.

Clients in a closed loop send streamed completions whose prompts and answers have many lengths, so that steps of many
shapes come. What a server has not compiled or loaded yet shows in the first stretch.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from benchmarks.serving.completions import streamed

PROMPT_TOKENS, OUTPUT_TOKENS = (16, 1024), (16, 256)
"""The shortest and the longest."""
STRETCH_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request."""

    sent_s: float
    """Since the load began."""
    ttft_ms: float
    tpot_ms: float
    tokens: int


def first_minutes(url: str, model: str, vocabulary: int, *, clients: int, seconds: float) -> dict[str, Any]:
    """Load a server for so many seconds; return its requests, and what each minute was like, or the whole if shorter.

    Args:
        url: of the server, without /v1.
        model: the name it serves.
        vocabulary: its tokens are drawn from it.
        clients: how many send at once.
        seconds: for how long requests are sent; those that are on the way then are answered.
    """
    answers: list[Answer] = []
    failures: list[Exception] = []
    began = time.monotonic()

    def client(seed: int) -> None:
        generator = random.Random(f"first minutes {seed}")
        try:
            while (sent := time.monotonic() - began) < seconds:
                prompt = [generator.randrange(100, vocabulary - 100) for _ in range(generator.randint(*PROMPT_TOKENS))]
                answers.append(_answer(url, model, prompt, generator.randint(*OUTPUT_TOKENS), sent))
        except Exception as error:  # noqa: BLE001 - told below, in the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    stretch = min(STRETCH_S, seconds)
    ends = [stretch * (number + 1) for number in range(max(1, int(seconds // stretch)))]
    return {
        "clients": clients,
        "stretches": [_stretch(answers, end - stretch, end) for end in ends],
        "requests": [
            [round(value, 3) for value in astuple(each)] for each in sorted(answers, key=lambda it: it.sent_s)
        ],
    }


def _answer(url: str, model: str, prompt: list[int], tokens: int, sent_s: float) -> Answer:
    started = time.monotonic()
    arrived = [time.monotonic() for _ in streamed(url, model, prompt, tokens)]
    first, last = arrived[0], arrived[-1]
    return Answer(sent_s, 1000 * (first - started), 1000 * (last - first) / max(1, tokens - 1), tokens)


def _stretch(answers: list[Answer], begin_s: float, end_s: float) -> dict[str, Any]:
    """Return what the requests were like that were sent in a stretch."""
    sent = [each for each in answers if begin_s <= each.sent_s < end_s]
    found: dict[str, Any] = {"from_s": begin_s, "to_s": end_s, "requests": len(sent)}
    for name in ("ttft_ms", "tpot_ms"):
        values = [getattr(each, name) for each in sent]
        median, p99, most = np.quantile(values, (0.5, 0.99, 1.0)).round(3).tolist() if sent else (None,) * 3
        found |= {f"{name}_median": median, f"{name}_p99": p99, f"{name}_most": most}
    return found | {"output_tokens_per_s": round(sum(each.tokens for each in sent) / (end_s - begin_s), 1)}
