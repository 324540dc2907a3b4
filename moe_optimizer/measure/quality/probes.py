"""Chooses what two servers are asked, so that every kernel of the plan computes: numbers of tokens in one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.plan.pass_params import FlashDmoeParams, SchedulerParams
from moe_optimizer.plan.plan import Plan

Kind = Literal["prefill", "long prefill", "decode"]

_SIZES = (1, 8, 64, 256)
"""Chosen: tokens in a step where the plan names no ranges."""
_LARGEST_DECODE = 128
"""Chosen: more sequences at once take long, and prefill reaches the same kernels."""
_LEAST_PREFILL = 16
_LARGEST_SCORED = 1024
"""Chosen: vLLM makes logits of all tokens of a prompt at once for their distributions; 1024 x 152k of them in float32
are 0.6 GB, which a GPU that is planned full may not have."""
_PROMPT = 64
"""Chosen: tokens before the generated ones."""
_LONG_PROMPTS = 4
_LEAST_PROMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Some prompts, all of which put the same number of tokens into a step."""

    kind: Kind
    tokens: int
    """In one step: of a prompt, or sequences that are decoded together."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    generated: int
    """Tokens generated from each prompt; 0: the distributions behind the prompt's own tokens are compared."""

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.kind.replace(' ', '-')}-{self.tokens}"

    @property
    def together(self) -> bool:
        """Whether the prompts are sent in one request."""
        return self.kind == "decode" and self.tokens > 1

    @property
    def positions(self) -> int:
        """At most so many distributions are compared."""
        return sum(self.generated or len(prompt) - 1 for prompt in self.prompts)

    def __str__(self) -> str:
        return f"{self.kind}, {self.tokens} at once" if self.kind == "decode" else f"{self.kind}, {self.tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is asked."""

    positions: int
    """Tokens of the text whose distributions are compared, in all prefill probes together."""
    generated: int
    """Tokens generated from each prompt."""


def step_sizes(plan: Plan) -> tuple[int, ...]:
    """Return numbers of tokens that reach each kernel of a plan: both ends of every planned range, and a whole step."""
    params = plan.decision("flash_dmoe").params
    dispatch = params.dispatch if isinstance(params, FlashDmoeParams) else {}
    ends = {each.up_to for ranges in dispatch.values() for each in ranges}
    # One token behind each range is the first of the next: vLLM's own kernel behind the last.
    sizes = {1, *ends, *(end + 1 for end in ends)} if ends else set(_SIZES)
    scheduler = plan.decision("scheduler").params
    return tuple(
        sorted(sizes | ({scheduler.max_num_batched_tokens} if isinstance(scheduler, SchedulerParams) else set()))
    )


def most_sequences(plan: Plan) -> int:
    """Return how many sequences a plan decodes at once."""
    params = plan.decision("scheduler").params
    return params.max_num_seqs if isinstance(params, SchedulerParams) else plan.workload.batch_size


def probes(
    tokens: Sequence[int], sizes: Sequence[int], *, extent: Extent, max_num_seqs: int, max_model_len: int
) -> tuple[Probe, ...]:
    """Return what to ask.

    Args:
        tokens: of the text; it is read from its beginning again where it ends.
        sizes: tokens in one step that matter.
        extent: how much.
        max_num_seqs: sequences that a server decodes at once.
        max_model_len: tokens of the longest prompt and completion.
    """
    windows = _Windows(tokens)
    longest = max_model_len - 1
    prompt, generated = min(_PROMPT, max(1, longest // 2)), min(extent.generated, longest // 2)
    scored = sorted({min(size, longest) for size in sizes if size >= _LEAST_PREFILL} or {min(256, longest)})
    short = [size for size in scored if size <= _LARGEST_SCORED] or [min(_LARGEST_SCORED, longest)]
    found = []
    for size in short:
        number = max(_LEAST_PROMPTS, extent.positions // len(short) // size)
        prompts = tuple(windows(size, number))
        found.append(Probe(kind="prefill", tokens=size, prompts=prompts, generated=0))
    for size in sorted({size for size in scored if size > _LARGEST_SCORED}):
        prompts = tuple(windows(size, _LONG_PROMPTS))
        found.append(Probe(kind="long prefill", tokens=size, prompts=prompts, generated=1))
    batches = sorted({1, *(size for size in sizes if size <= min(max_num_seqs, _LARGEST_DECODE))})
    shared = tuple(windows(prompt, max(batches[-1], _LEAST_PROMPTS)))
    for size in batches:
        # The first prompts of every batch are the same: alone and among others they should be continued alike.
        prompts = shared[: max(size, _LEAST_PROMPTS) if size == 1 else size]
        found.append(Probe(kind="decode", tokens=size, prompts=prompts, generated=generated))
    return tuple(found)


class _Windows:
    """Cuts a text that has no end into pieces, one behind the other."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._stream = itertools.cycle(tokens)

    def __call__(self, size: int, number: int) -> Iterator[tuple[int, ...]]:
        for _ in range(number):
            yield tuple(itertools.islice(self._stream, size))
