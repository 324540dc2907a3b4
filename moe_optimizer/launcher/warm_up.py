"""Drives a server that is up through the shapes that traffic can bring, until nothing compiles any more.

What a kernel or a graph is compiled for (batch sizes, prompt lengths, sampling parameters) would otherwise let a user's
request wait. Everything goes over HTTP, as a user's requests do.
"""

from __future__ import annotations

import concurrent.futures
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.launcher.http_client import ServerClient

DEFAULT_LIMIT_S = 120.0
"""Chosen: the shapes of a round take some seconds on a GPU, compiling for them a minute or two on a first start."""
_ROUNDS = 4
"""Chosen: a second round finds what the first brought; more are needed where two things must meet."""
PROOF_PAUSE_S = 1.5
"""Until the proofs have what was compiled: they are written once a second."""
_TOKEN_IDS = 200
"""Chosen: ids below are in every vocabulary; they start at 10, after most special tokens."""
_LONGEST = 32_768
"""Chosen: of a long context; attention over a longer one uses the same kernels."""

_REPEATED, _REPEATS = 4, 8
"""Chosen: tokens of a pattern and how often a prompt has it, so that an answer goes on with it."""

AHEAD_S = 0.05
"""Until requests that are to be decoded beside a prompt have begun."""
_POLL_S = 0.05

Compiled = Callable[[], int]
"""Returns how many kernels and graphs the workers have compiled so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What one server can be asked."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafts: bool = False
    """Whether steps check drafts, of which prompts that repeat themselves bring most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request of a warm-up."""

    what: str
    """In words, for the progress."""
    body: Mapping[str, Any]
    beside: Mapping[str, Any] | None = None
    """A request that is decoded while `body` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpResult:
    """How a warm-up ended."""

    seconds: float
    compiled: int
    """During the warm-up."""
    settled: bool
    """Whether a last round compiled nothing."""
    refused: int
    """Requests that the server did not answer, for example because its vLLM does not know a parameter."""

    def in_words(self) -> str:
        """Return it as a line for the user."""
        end = "" if self.settled else "; stopped before nothing compiled any more: a request may still wait for it"
        refused = f", {self.refused} requests refused" if self.refused else ""
        return f"warmed up in {self.seconds:.0f} s: {self.compiled} compilations{refused}{end}"


def warm_up(
    clients: Sequence[ServerClient],
    model: str,
    shapes: Shapes,
    compiled: Compiled,
    *,
    limit_s: float,
    pause: Callable[[float], None],
    say: Callable[[str], None],
) -> WarmUpResult:
    """Send rounds of requests to every server until a round compiles nothing or the time is over.

    Args:
        clients: the servers.
        model: its name in requests.
        shapes: what each can be asked.
        compiled: counts over all workers.
        limit_s: for everything.
        pause: sleeps for some seconds, and raises when waiting is pointless.
        say: shows progress, a line at a time.
    """
    begin = time.monotonic()
    deadline, first = begin + limit_s, compiled()
    before, settled, refused = first, False, 0
    for number in range(_ROUNDS):
        requests = tuple(requests_for(shapes, seed=number))
        for index, request in enumerate(requests):
            if index % 10 == 0:
                done = f"round {number + 1}, {index} of {len(requests)} requests, {time.monotonic() - begin:.0f} s"
                say(f"warming up: {done}: {request.what}")
            for client in clients:
                refused += not _answered(client, model, request, deadline, pause)
        pause(PROOF_PAUSE_S)
        now = compiled()
        settled = now == before and time.monotonic() < deadline
        if settled or time.monotonic() >= deadline:
            break
        before = now
    return WarmUpResult(seconds=time.monotonic() - begin, compiled=compiled() - first, settled=settled, refused=refused)


def requests_for(shapes: Shapes, *, seed: int) -> Iterator[Request]:
    """Yield the requests of a round: decode batches, prompts of many lengths, sampling, streams, both at once."""
    prompts = Prompts(seed)
    room = shapes.max_model_len - 8
    for batch in _batches(shapes.max_num_seqs):
        length = max(1, min(5, room))
        yield Request(what=f"{batch} requests at once", body=_body([prompts.of(length) for _ in range(batch)], 4))
    if shapes.drafts and room >= _REPEATED * _REPEATS:
        for batch in _batches(shapes.max_num_seqs):
            repeated = [prompts.of(_REPEATED) * _REPEATS for _ in range(batch)]
            yield Request(what=f"{batch} requests that repeat themselves", body=_body(repeated, 8))
    for settings in _SAMPLING:
        for batch in {1, min(3, shapes.max_num_seqs)}:
            body = {**_body([prompts.of(max(1, min(9, room))) for _ in range(batch)], 4), **settings}
            yield Request(what=f"sampling with {', '.join(settings)}", body=body)
    longest = max(1, min(room, _LONGEST))
    for length in _lengths(min(longest, 2 * shapes.max_num_batched_tokens)):
        yield Request(what=f"a prompt of {length} tokens", body=_body([prompts.of(length)], 2))
    yield Request(what="a stream", body=_body([prompts.of(max(1, min(9, room)))], 8) | {"stream": True})
    for length in _lengths(min(room, shapes.max_num_batched_tokens))[-3:]:
        few = [prompts.of(max(1, min(7, room))) for _ in range(min(4, shapes.max_num_seqs))]
        decoded = _body(few, max(1, min(32, room - 7))) | {"ignore_eos": True}
        yield Request(
            what=f"a prompt of {length} tokens while others decode", body=_body([prompts.of(length)], 2), beside=decoded
        )
    # Last: on a slow machine it takes what is left of the time.
    yield Request(what=f"a long context of {longest} tokens", body=_body([prompts.of(longest)], 4))


_SAMPLING: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "seed": 7},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logprobs": 5},
    {"temperature": 0.8, "n": 2},
    {"logit_bias": {"11": 1.0}},
    {"min_tokens": 2, "stop": ["no such end"]},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.05, "logprobs": 2, "seed": 1},
)


class Prompts:
    """Random prompts, so that none is found in the prefix cache."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, length: int) -> list[int]:
        """Return the next prompt, of so many tokens."""
        return [self._random.randrange(10, _TOKEN_IDS) for _ in range(length)]


def _body(prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompts), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _batches(most: int) -> list[int]:
    """Return decode batches: powers of two, one more than those, and the largest."""
    powers = [2**power for power in range(12) if 2**power < most]
    return sorted({1, most, *powers, *(power + 1 for power in powers if 2 < power < most)})


def _lengths(most: int) -> list[int]:
    """Return lengths of prompts: powers of two, some tokens more, and the longest. Kernels are compiled apart for
    numbers that divide by 16.
    """
    most = max(1, most)
    powers = [2**power for power in range(4, 20) if 2**power <= most]
    return sorted({most, *powers, *(power + 5 for power in powers if power + 5 <= most)})


def _answered(
    client: ServerClient, model: str, request: Request, deadline: float, pause: Callable[[float], None]
) -> bool:
    """Send one request, and the one beside it before; return whether they were answered. `pause` may end the wait."""
    left = deadline - time.monotonic()
    if left <= 0:
        return True
    executor = concurrent.futures.ThreadPoolExecutor(2)
    sent = []
    for body in filter(None, (request.beside, request.body)):
        sent.append(executor.submit(client.generate, {"model": model, **body}, timeout_s=left))
        if request.beside is not None:
            pause(AHEAD_S)
    # Not waited for: when a stop is asked for, the server's end answers what is on the way.
    executor.shutdown(wait=False)
    while concurrent.futures.wait(sent, timeout=_POLL_S).not_done:
        pause(0.0)
    return not any(isinstance(each.exception(), OSError) for each in sent)
