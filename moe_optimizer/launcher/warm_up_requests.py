"""Makes the requests of a warm-up: the shapes that traffic can bring, as far as kernels differ by them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.proof.record import PADDED_REPLAYS

_TOKEN_IDS = 200
"""Chosen: ids below are in every vocabulary; they start at 10, after most special tokens."""
_LONGEST = 32_768
"""Chosen: of a long context; attention over a longer one uses the same kernels."""

_REPEATED, _REPEATS = 4, 8
"""Chosen: tokens of a pattern and how often a prompt has it, so that an answer goes on with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What one server can be asked."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafts: bool = False
    """Whether steps check drafts, of which prompts that repeat themselves bring most."""
    handed_over: bool = False
    """Whether another server reads the prompts, so that nobody is asked for what is known while reading."""
    copies: int = 1
    """Data parallel ranks, whose tokens come together in the experts."""
    captured: int = 0
    """Tokens of a step up to which vLLM has captured graphs, and so compiled what they hold; 0: none are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request of a warm-up."""

    what: str
    """In words, for the progress."""
    body: Mapping[str, Any]
    beside: Mapping[str, Any] | None = None
    """A request that is decoded while `body` is."""
    proves: bool = False
    """Also sent where an earlier start has left all kernels: graphs are another process's, and the shapes at the ends
    show that indeed nothing is compiled.
    """


def groups_for(shapes: Shapes, *, seed: int) -> dict[str, list[Request]]:
    """Return the requests of a round, by what they bring: decode batches, ways to sample, prompts of many lengths, a
    stream, prompts beside requests that decode.
    """
    prompts = Prompts(seed)
    room = shapes.max_model_len - 8
    longest = max(1, min(room, _LONGEST))
    groups = {
        "decode batches": list(_decode_batches(shapes, prompts, room)),
        "sampling": list(_sampled(shapes, prompts, room)),
        "prompts": list(_prompts(shapes, prompts, longest)),
        "prompts beside decoding": list(_mixed(shapes, prompts, room)),
    }
    if longest > 2 * shapes.max_num_batched_tokens:
        # Last: on a slow machine it takes what is left of the time.
        long = Request(what=f"a long context of {longest} tokens", body=_body([prompts.of(longest)], 4))
        groups["a long context"] = [long]
    return groups


def _decode_batches(shapes: Shapes, prompts: Prompts, room: int) -> Iterator[Request]:
    batches = _batches(shapes.max_num_seqs, shapes.captured)
    for batch in batches:
        # The first token is of the prompt.
        body = _body([prompts.of(max(1, min(5, room))) for _ in range(batch)], 1 + PADDED_REPLAYS)
        yield Request(what=f"{batch} requests at once", body=body, proves=True)
    if shapes.drafts and room >= _REPEATED * _REPEATS:
        for batch in batches:
            repeated = [prompts.of(_REPEATED) * _REPEATS for _ in range(batch)]
            yield Request(what=f"{batch} requests that repeat themselves", body=_body(repeated, 8))


def _sampled(shapes: Shapes, prompts: Prompts, room: int) -> Iterator[Request]:
    alone = [each for each in _SAMPLING if not (shapes.handed_over and "prompt_logprobs" in each)]
    for settings, batches in ((alone, (1,)), (_SAMPLED_TOGETHER, _TOGETHER)):
        for batch in sorted({min(batch, shapes.max_num_seqs) for batch in batches}):
            for each in settings:
                body = {**_body([prompts.of(max(1, min(9, room))) for _ in range(batch)], 3), **each}
                yield Request(what=f"{batch} requests with {', '.join(each)}", body=body)


def _prompts(shapes: Shapes, prompts: Prompts, longest: int) -> Iterator[Request]:
    lengths = _lengths(min(longest, 2 * shapes.max_num_batched_tokens), shapes.captured)
    for length in lengths:
        ends = length in (lengths[0], lengths[-1])
        yield Request(what=f"a prompt of {length} tokens", body=_body([prompts.of(length)], 2), proves=ends)
    if longest < shapes.max_num_batched_tokens or shapes.copies > 1:
        # No prompt alone is a step as large as traffic can bring. The first may have a step for itself.
        fill = min(-(-shapes.max_num_batched_tokens // longest), shapes.max_num_seqs)
        count = (1 + fill) * shapes.copies
        together = _body([prompts.of(longest) for _ in range(count)], 2)
        yield Request(what=f"{count} prompts of {longest} tokens in a step", body=together)
    yield Request(what="a stream", body=_body([prompts.of(min(9, longest))], 8) | {"stream": True}, proves=True)


def _mixed(shapes: Shapes, prompts: Prompts, room: int) -> Iterator[Request]:
    lengths = _lengths(min(room, shapes.max_num_batched_tokens), shapes.captured)[-3:]
    for length in lengths:
        few = [prompts.of(max(1, min(7, room))) for _ in range(min(4, shapes.max_num_seqs))]
        decoded = _body(few, max(1, min(24, room - 7)))
        yield Request(
            what=f"a prompt of {length} tokens while others decode", body=_body([prompts.of(length)], 2),
            beside=decoded, proves=length == lengths[-1],
        )  # fmt: skip


_SAMPLING: tuple[Mapping[str, Any], ...] = (
    # First: what some versions of vLLM compile for it in every process has no others sent again.
    {"logprobs": 5},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "seed": 7},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 1},
    {"temperature": 0.8, "n": 2},
    {"logit_bias": {"11": 1.0}},
    {"min_tokens": 2, "stop": ["no such end"]},
    {"response_format": {"type": "json_object"}},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.05, "logprobs": 2, "seed": 1},
)


_SAMPLED_TOGETHER: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.05, "logprobs": 2},
    {"temperature": 0.8, "min_p": 0.05, "logit_bias": {"11": 1.0}, "min_tokens": 2, "presence_penalty": 0.5},
)
"""No seeds: vLLM's CPU build (0.32) ends where a step holds only a part of a prompt with one."""
_TOGETHER = (9, 16)
"""From eight requests on vLLM takes kernels of its own for top_k and top_p, each of both for itself; kernels are
compiled apart for numbers that divide by 16."""


class Prompts:
    """Random prompts, so that none is found in the prefix cache."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, length: int) -> list[int]:
        """Return the next prompt, of so many tokens."""
        return [self._random.randrange(10, _TOKEN_IDS) for _ in range(length)]


def _body(prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompts), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _batches(most: int, captured: int) -> list[int]:
    """Return decode batches: powers of two, one more than those, and the largest. What a graph holds is compiled, and
    around it a batch of more than 17 is like one of 17.
    """
    powers = [2**power for power in range(12) if 2**power < most]
    more = {power + 1 for power in powers if 2 < power < most}
    return sorted({1, most, *powers, *(batch for batch in more if batch <= 17 or batch > captured)})


def _lengths(most: int, captured: int) -> list[int]:
    """Return lengths of prompts: powers of two, some tokens more, half as much again, and the longest.

    Kernels are compiled apart for numbers that divide by 16, and vLLM's tuned configurations change at powers of two
    and between them. Between the shortest lengths and the largest graph there is nothing left to compile.
    """
    most = max(1, most)
    powers = [2**power for power in range(4, 20) if 2**power <= most]
    more = {length for power in powers for length in (power + 5, power * 3 // 2) if length <= most}
    return sorted({most, *(length for length in (*powers, *more) if length <= 21 or length >= captured)})
