"""Sends servers prompts of any length in batches of any size: what compiles by the number of tokens is compiled then.

vLLM's kernels for gpt-oss's experts are such: rounds of fixed lengths go on meeting new ones.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from benchmarks.serving.completions import streamed

_CLIENTS = 48
_LONGEST_PROMPT, _LONGEST_ANSWER = 2048, 48


def drive(servers: Sequence[tuple[str, str, int, int]], seconds: float) -> None:
    """Load all servers at the same time for so long.

    Args:
        servers: URL without /v1, the name that it serves, how many tokens it knows, and the most that it takes.
        seconds: after which no request begins, but for each client's first.

    Raises:
        OSError: a request failed.
    """
    end, errors = time.monotonic() + seconds, []

    def client(number: int, url: str, model: str, vocabulary: int, max_model_len: int) -> None:
        draw, longest = random.Random(f"{url} {number}"), min(_LONGEST_PROMPT, max_model_len - _LONGEST_ANSWER)
        try:
            while True:
                # As many short ones as long ones, and at times few at once.
                length = int(longest ** draw.random())
                prompt = [draw.randrange(vocabulary // 100, vocabulary) for _ in range(length)]
                for _ in streamed(url, model, prompt, draw.randint(1, _LONGEST_ANSWER)):
                    pass
                if time.monotonic() >= end:
                    return
                time.sleep(draw.random())
        except OSError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=client, args=(number, *server)) for server in servers for number in range(_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
